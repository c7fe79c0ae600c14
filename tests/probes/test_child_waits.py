"""The child process that the main thread waits for."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
from polling import until

from lightning_ncclsafe.facts import ChildProcess
from lightning_ncclsafe.probes.process.lock_waits import command_words
from lightning_ncclsafe.probes.process.outside_waits import awaited_by, waited_for

SLEEP = ["sleep", "60"]


def seen_during(wait: Callable[[], object], count: int = 1) -> tuple[ChildProcess, ...]:
    """What a thread sees while the main thread waits; then the processes are ended."""
    seen: list[tuple[ChildProcess, ...]] = []

    def has_seen() -> bool:
        seen.append(waited_for())
        # Until it has become the program that it was forked for; a shell may sleep before that.
        is_there = len(seen[-1]) >= count and seen[-1][-1].state == "sleeping" and bool(seen[-1][-1].wait_channel)
        return is_there and not seen[-1][-1].command.startswith("sh ")

    def look() -> None:
        with suppress(AssertionError):
            until(has_seen, within_s=10)
        for child in psutil.Process().children(recursive=True):
            if any(child.pid == one.pid for one in seen[-1]):
                child.kill()

    thread = threading.Thread(target=look)
    thread.start()
    wait()
    thread.join()
    return seen[-1]


@pytest.mark.parametrize(
    "wait",
    [
        lambda: subprocess.run(SLEEP, check=False),
        lambda: subprocess.run(SLEEP, check=False, timeout=50),
        lambda: subprocess.run(SLEEP, check=False, capture_output=True),
        lambda: os.system("exec sleep 60"),
    ],
    ids=["wait", "wait with a limit", "output", "os.system"],
)
def test_an_awaited_program_is_found(wait: Callable[[], object]) -> None:
    (child,) = seen_during(wait)
    assert (child.command, child.parent, child.state) == ("sleep 60", os.getpid(), "sleeping")
    assert child.wait_channel and child.age_s is not None and child.age_s < 60


def test_a_program_started_by_an_awaited_shell_is_found() -> None:
    shell, program = seen_during(lambda: subprocess.run(["sh", "-c", "sleep 60; true"], check=False), 2)
    assert shell.command == "sh -c"
    assert (program.command, program.parent) == ("sleep 60", shell.pid)


def test_a_joined_process_is_found() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    assert [child.pid for child in seen_during(process.join)] == [process.pid]
    process.close()


def test_an_unawaited_child_is_ignored() -> None:
    child = subprocess.Popen(SLEEP)
    try:
        assert waited_for() == ()
    finally:
        child.kill()
        child.wait()


def test_a_child_awaited_by_another_process_is_found() -> None:
    program = "import os; os.waitpid(os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '60'), 0)"
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as process:
        try:
            (child,) = until(lambda: [one for one in awaited_by(process.pid) if one.command == "sleep 60"])
        finally:
            for one in [*psutil.Process(process.pid).children(), process]:
                one.kill()
    assert child.parent == process.pid


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/opt/venv/bin/python3.11", "score.py", "--key", "secret"], "python3.11 score.py"),
        (
            ["/usr/bin/python3.11", "/home/me/projects/a-very-long-name/of/a/repository/tools/score_images.py"],
            "python3.11 …/of/a/repository/tools/score_images.py",
        ),
        (["python", f"/data/{'x' * 80}.py"], f"python …{'x' * 49}.py"),
        (["y" * 80], "y" * 60),
        (["y" * 50, "z" * 50], f"{'y' * 50} {'z' * 9}"),
        (["python", "-m", "package.tool"], "python -m package.tool"),
        ([], ""),
    ],
)
def test_of_a_long_command_the_program_and_the_name_of_its_script_are_left(arguments: list[str], words: str) -> None:
    assert command_words(arguments) == words
