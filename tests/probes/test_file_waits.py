"""What the main thread reads from or writes to, and which program has the other end of a pipe."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from polling import until

from lightning_ncclsafe.probes.process.outside_waits import awaited_by, awaited_file, program_at_other_end, reads_alone

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
# It answers only once its input has ended.
SHELL = ["sh", "-c", "cat > /dev/null; echo done"]


def seen_during(wait: Callable[[], object], end: Callable[[], object]) -> tuple[str, int]:
    """What a thread sees while the main thread waits; ``end`` lets it go on."""
    seen: list[tuple[str, int]] = []

    def look() -> None:
        with suppress(AssertionError):
            until(lambda: awaited_file().startswith(("pipe:", "/tmp", str(Path.cwd()))) or None, within_s=10)
        seen.append((awaited_file(), program_at_other_end()))
        end()

    thread = threading.Thread(target=look)
    thread.start()
    wait()
    thread.join()
    return seen[0]


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SHELL, **PIPES) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


def test_a_program_whose_answer_is_read_is_found(program: subprocess.Popen[bytes]) -> None:
    assert program.stdout
    file, pid = seen_during(program.stdout.readline, program.kill)
    assert (file, pid) == (os.readlink(f"/proc/self/fd/{program.stdout.fileno()}"), program.pid)


def test_a_worker_that_has_inherited_both_ends_is_not_the_program() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(["sleep", "60"], stdout=writing) as process:
        worker = os.fork()
        if not worker:
            signal.pause()
        os.close(writing)

        def end() -> None:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            process.kill()

        assert seen_during(lambda: os.read(reading, 1), end)[1] == process.pid
    os.close(reading)


def test_a_program_that_does_not_read_its_input_is_found() -> None:
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as process:
        assert process.stdin
        descriptor = process.stdin.fileno()

        def write() -> None:
            with suppress(BrokenPipeError):
                os.write(descriptor, bytes(1 << 20))

        assert seen_during(write, process.kill)[1] == process.pid


def test_the_other_end_may_be_ours_or_have_a_name(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    file, pid = seen_during(lambda: os.read(reading, 1), lambda: os.write(writing, b"."))
    assert (file, pid) == (os.readlink(f"/proc/self/fd/{reading}"), 0)
    named = tmp_path / "fifo"
    os.mkfifo(named)
    both = os.open(named, os.O_RDWR)
    with named.open("wb") as other, subprocess.Popen(["sleep", "60"], stdout=other) as process:
        assert seen_during(lambda: os.read(both, 1), lambda: os.write(both, b".")) == (str(named), 0)
        process.kill()
    for descriptor in (reading, writing, both):
        os.close(descriptor)


@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_pipe_that_no_other_process_has_open_is_read_alone(is_inherited: bool) -> None:
    reading, writing = os.pipe()
    command = ["sleep", "60"]
    process = subprocess.Popen(command, stdout=writing if is_inherited else None)
    seen: list[bool] = []

    def end() -> None:
        seen.append(reads_alone())
        os.write(writing, b".")

    seen_during(lambda: os.read(reading, 1), end)
    process.kill()
    process.wait()
    assert seen == [not is_inherited]
    assert not reads_alone()
    os.close(reading)
    os.close(writing)


def test_a_pipe_that_a_thread_may_fill_is_not_read_alone() -> None:
    reading, writing = os.pipe()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    aside = threading.Thread(target=lambda: done.wait())
    thread.start()
    seen: list[bool] = []

    def end() -> None:
        seen.append(reads_alone())
        aside.start()
        seen.append(reads_alone())
        os.write(writing, b".")

    seen_during(lambda: os.read(reading, 1), end)
    done.set()
    thread.join()
    aside.join()
    os.close(reading)
    os.close(writing)
    assert seen == [True, False]


def test_which_of_two_programs_is_waited_for_is_unknown() -> None:
    reading, writing = os.pipe()
    processes = [subprocess.Popen(["sleep", "60"], stdout=writing) for _ in range(2)]
    os.close(writing)

    def end() -> None:
        for process in processes:
            process.kill()
            process.wait()

    assert seen_during(lambda: os.read(reading, 1), end)[1] == 0
    os.close(reading)


def test_a_main_thread_that_reads_nothing_waits_for_no_file() -> None:
    done = threading.Event()
    seen: list[tuple[str, int]] = []

    def look() -> None:
        seen.append((awaited_file(), program_at_other_end()))
        done.set()

    threading.Thread(target=look).start()
    assert done.wait(60)
    assert seen == [("", 0)]


def test_the_program_is_the_awaited_process_also_of_another_process() -> None:
    reads = "import subprocess; subprocess.Popen(['sleep', '60'], stdout=subprocess.PIPE).stdout.read()"
    with subprocess.Popen([sys.executable, "-S", "-c", reads]) as process:
        try:
            (child,) = until(lambda: [one for one in awaited_by(process.pid) if one.command == "sleep 60"])
        finally:
            for one in [*psutil.Process(process.pid).children(), process]:
                one.kill()
    assert child.parent == process.pid
