"""What a process that a signal has ended leaves to those that held its file."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_threads import join_own_threads

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process import crash_traces
from lightning_ncclsafe.probes.process.crash_traces import (
    CrashTrace,
    CrashTraces,
    parse_crash,
    parse_crash_of_fork,
    why,
)
from lightning_ncclsafe.probes.process.traceback_signal import Armed

ASKED = """Thread 0x00007f11 (most recent call first):
  File "/home/me/asked.py", line 1 in asked

"""
ABORTED = """Fatal Python error: Aborted

Thread 0x00007f22 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007f11 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 57 in training_step

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
NOTHING = CrashTrace("", ())
COUNTING = """Fatal Python error: Aborted

Thread 0x00007f33 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 90 in count
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f11 (most recent call first):
  File "/home/me/train.py", line 57 in training_step
"""
IN_MAIN = ABORTED.replace("Aborted", "Segmentation fault").replace("Thread 0x00007f11", "Current thread 0x00007f11")


@pytest.mark.parametrize(("text", "signal_name"), [(ABORTED, "SIGABRT"), (IN_MAIN, "SIGSEGV")])
def test_requested_tracebacks_precede_a_fatal_error(text: str, signal_name: str) -> None:
    found = parse_crash(ASKED + text)
    assert found.signal == signal_name
    assert found.stack[0] == Frame(file="/home/me/train.py", line=57, function="training_step", user=True)
    assert [frame.function for frame in found.stack] == ["training_step", "all_reduce"]


def test_a_trace_that_has_crashed_itself_tells_only_the_first_signal() -> None:
    """As other threads run on while it is written."""
    cut = ABORTED.partition("Thread 0x00007f11")[0]
    assert parse_crash(cut + IN_MAIN) == CrashTrace("SIGABRT", ())
    assert parse_crash_of_fork(cut + IN_MAIN, "SIGABRT", 0) == ()


def test_a_collective_in_another_thread_is_found() -> None:
    found = parse_crash(COUNTING)
    assert [frame.function for frame in found.stack] == ["training_step"]
    assert [frame.function for frame in found.thread_stack] == ["run", "count", "all_reduce"]
    assert not parse_crash(ABORTED).thread_stack


def test_requested_tracebacks_are_not_crashes() -> None:
    assert parse_crash(ASKED) == parse_crash("") == NOTHING


def test_a_fatal_python_error_is_named_by_its_message() -> None:
    assert parse_crash("Fatal Python error: _PyGC_ObjectGCTrack: already tracked by the gc").signal.startswith("_PyGC")


@pytest.fixture
def words() -> Iterator[CrashTraces]:
    found = CrashTraces()
    yield found
    found.close()


def started(script: str) -> tuple["subprocess.Popen[str]", list[int]]:
    """A process that prints numbers, the first of which is its file, and then waits for a line; and these numbers."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    return process, [int(number) for number in process.stdout.readline().split()]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux only")
def test_crash_traces_outlive_their_process(words: CrashTraces) -> None:
    """The file is private to a process that ends and is reaped, and its trace is still readable."""

    script = (
        "import faulthandler, os, sys, time\n"
        "from lightning_ncclsafe.probes.process.traceback_signal import TracebackSignal\n"
        "first, on = TracebackSignal(), faulthandler.is_enabled\n"
        "states = [on(), bool(first.arm()) and on(), first.close() or on()]\n"
        "faulthandler.enable()\n"
        "second = TracebackSignal()\n"
        "states += [bool(second.arm()) and on(), second.close() or on()]\n"
        "faulthandler.disable()\n"
        "TracebackSignal().arm()\n"
        "print(*map(int, states), flush=True)\n"
        "sys.stdin.readline()\n"
        "os.abort()\n"
    )
    process, states = started(script)
    # What the user has switched on stays as it is.
    assert states == [0, 1, 0, 1, 1]
    words.hold([process.pid, process.pid, os.getpid()])
    process.communicate("\n", timeout=30)
    assert process.returncode == -signal.SIGABRT
    found = words.of(process.pid)
    assert found.signal == "SIGABRT"
    assert [frame.function for frame in found.stack] == ["<module>"]
    assert words.of(os.getpid()) == NOTHING


def test_faulthandler_changes_by_the_user_are_kept() -> None:
    script = (
        "import faulthandler\n"
        "from lightning_ncclsafe.probes.process.traceback_signal import TracebackSignal\n"
        "first, second = TracebackSignal(), TracebackSignal()\n"
        "first.arm()\n"
        "faulthandler.enable()\n"
        "first.close()\n"
        "assert faulthandler.is_enabled()\n"
        "faulthandler.disable()\n"
        "second.arm()\n"
        "assert faulthandler.is_enabled()\n"
        "faulthandler.disable()\n"
        "second.close()\n"
        "assert not faulthandler.is_enabled()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux only")
def test_a_crashing_fork_leaves_no_trace_for_its_parent(words: CrashTraces) -> None:
    script = (
        "import os, signal, sys\n"
        "from lightning_ncclsafe.probes.process.traceback_signal import TracebackSignal\n"
        "TracebackSignal().arm()\n"
        "if not (child := os.fork()):\n"
        "    os.abort()\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(os.WTERMSIG(status), flush=True)\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process, (ended_by,) = started(script)
    words.hold([process.pid])
    process.communicate("\n", timeout=30)
    assert (ended_by, process.returncode) == (signal.SIGABRT, -signal.SIGKILL)
    assert words.of(process.pid) == NOTHING


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux only")
def test_an_uncaught_exception_outlives_its_process(words: CrashTraces) -> None:
    script = (
        "import sys\n"
        "from lightning_ncclsafe.probes.process.traceback_signal import TracebackSignal\n"
        "TracebackSignal().arm()\n"
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
        "raise KeyError('lr')\n"
    )
    process, _ = started(script)
    words.hold([process.pid])
    assert words.raised(process.pid) is None
    _, printed = process.communicate("\n", timeout=30)
    assert process.returncode == 1 and "KeyError: 'lr'" in printed
    raised = words.raised(process.pid)
    assert raised is not None and (raised.type, raised.message, raised.is_consequence) == ("KeyError", "'lr'", False)
    assert [(frame.line, frame.function) for frame in raised.stack] == [(6, "<module>")]
    assert words.of(process.pid) == NOTHING and words.raised(os.getpid()) is None


def test_a_dead_process_has_no_crash_trace(words: CrashTraces) -> None:
    words.hold([2**22 + 1])
    assert words.of(2**22 + 1) == NOTHING


WHAT = "[enforce fail at /pytorch/gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes. 9612 vs 8"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"Epoch 0\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  {WHAT}\n", WHAT),
        (f"  what():  first\n  what():  {WHAT}\nRuntimeError: Connection closed by peer\n", WHAT),
        ("python: pool.c:41: take: Assertion `n > 0' failed.\n", "python: pool.c:41: take: Assertion `n > 0' failed."),
        ("free(): invalid pointer\n", "free(): invalid pointer"),
        ("Traceback (most recent call last):\nValueError: what(): no\n", ""),
        ("", ""),
    ],
)
def test_the_reason_for_an_abort_is_parsed(text: str, said: str) -> None:
    assert why(text) == said


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux only")
def test_only_later_output_of_a_stderr_file_is_read(words: CrashTraces, tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from lightning_ncclsafe.probes.process.traceback_signal import TracebackSignal\n"
        "signal = TracebackSignal()\n"
        "signal.arm()\n"
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
        "if sys.argv[1:]:\n"
        "    print('  what():  of now', file=sys.stderr, flush=True)\n"
        "os.abort()\n"
    )
    for arguments, said in (["now"], "of now"), ([], ""):
        log = tmp_path / f"log-{len(arguments)}"
        log.write_text("  what():  of an earlier start\n")
        with log.open("a") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
            words.hold([process.pid])
            process.communicate("\n", timeout=30)
        assert words.of(process.pid).said == said


def test_a_stderr_on_unresponsive_storage_does_not_block(
    words: CrashTraces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, opened = threading.Event(), list[int]()

    def opening(pid: int, fd: int) -> int:
        if fd == 2:
            answers.wait(60)
        opened.append(os.open(tmp_path, os.O_RDONLY))
        return opened[-1]

    monkeypatch.setattr(crash_traces, "_open", opening)
    monkeypatch.setattr(crash_traces, "armed_in", lambda _: Armed(python_signum=61, c_signum=60, fd=0))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=log)
    words.hold([process.pid])
    assert words.of(process.pid) == NOTHING
    words.close()
    answers.set()
    join_own_threads("stderr")
    process.communicate(b"\n", timeout=30)
    assert len(opened) == 2
    for file in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
