"""Processes that hang, end, write too much or start others: all are over in time, and none is left."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from own_threads import own_threads
from polling import until

from lightning_ncclsafe.probes import directories
from lightning_ncclsafe.probes.directories import run_all

LONG_S = 20.0


def script(text: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", text, *arguments]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_outputs_are_returned_by_name() -> None:
    assert run_all({"a": ["echo", "one"], 2: ["echo", "two"]}, LONG_S) == {"a": "one\n", 2: "two\n"}


def test_running_nothing_returns_nothing() -> None:
    assert run_all({}, 0.1) == {}


def test_a_failing_program_has_no_output() -> None:
    assert run_all({"a": ["false"]}, LONG_S) == {"a": ""}


def test_a_blocked_program_is_killed_at_the_deadline(tmp_path: Path) -> None:
    """It reads from a pipe without a writer; the other program's answer counts."""
    pipe, told = tmp_path / "pipe", tmp_path / "pid"
    os.mkfifo(pipe)
    begin = time.monotonic()
    answers = run_all({"dead": ["sh", "-c", f"echo $$ > {told}; cat {pipe}"], "alive": ["echo", "here"]}, 0.5)
    took_s = time.monotonic() - begin
    assert answers == {"dead": None, "alive": "here\n"}
    assert 0.5 <= took_s < LONG_S
    assert gone(int(told.read_text()))


def test_its_children_are_killed_too(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    assert run_all({"a": ["sh", "-c", f"sleep 60 & echo $! > {told}; wait"]}, 0.5) == {"a": None}
    child = int(told.read_text())
    until(lambda: gone(child))


def test_all_programs_run_concurrently() -> None:
    begin = time.monotonic()
    programs = {str(number): ["sleep", "60"] for number in range(30)}
    assert set(run_all(programs, 0.4).values()) == {None}
    assert time.monotonic() - begin < 0.4 * len(programs)


def test_an_unkillable_program_is_reaped_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in uninterruptible sleep: here, killing is disabled."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(directories.os, "killpg", lambda pid, signum: None)
    assert run_all({"a": ["cat", str(pipe)]}, 0.1) == {"a": None}
    (reaper,) = own_threads("reap")
    assert reaper.daemon
    pipe.write_bytes(b"")
    reaper.join(LONG_S)
    assert not reaper.is_alive()


def test_excessive_output_is_truncated() -> None:
    begin = time.monotonic()
    answer = run_all({"a": ["yes"]}, LONG_S)["a"]
    assert answer is not None and len(answer) == 1 << 16
    assert time.monotonic() - begin < LONG_S


@pytest.fixture
def quiet_input() -> Iterator[None]:
    """An input that never says anything, and does not end."""
    kept, (here, there) = os.dup(0), os.pipe()
    os.dup2(here, 0)
    yield
    os.dup2(kept, 0)
    for file in (kept, here, there):
        os.close(file)


@pytest.mark.usefixtures("quiet_input")
def test_a_program_has_no_input_its_own_session_and_the_root_folder() -> None:
    text = "import os, sys; print(len(sys.stdin.read()), os.getsid(0) == os.getpid(), os.getcwd())"
    assert run_all({"a": script(text)}, 5) == {"a": "0 True /\n"}


def test_a_missing_program_raises_and_leaves_no_process() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(FileNotFoundError):
        run_all({"a": ["sleep", "60"], "b": ["/no/such/program"]}, LONG_S)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_no_process_or_file_is_left() -> None:
    children, files = len(psutil.Process().children()), psutil.Process().num_fds()
    run_all({"a": ["echo"], "b": ["sleep", "60"], "c": ["false"]}, 0.1)
    assert len(psutil.Process().children()) == children
    assert psutil.Process().num_fds() == files
