"""Stacks of processes that cannot answer for themselves: forked children, asked by signal."""

import faulthandler
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes import traceback_signal
from lightning_ncclsafe.probes.traceback_signal import Armed, TracebackSignal, ask, parse

FORK = multiprocessing.get_context("fork")
REAL_TIME = range(signal.SIGRTMIN + 1, signal.SIGRTMAX)


@pytest.fixture
def armed() -> Iterator[Armed]:
    traceback = TracebackSignal()
    armed = traceback.arm()
    assert armed is not None
    yield armed
    traceback.close()


@contextmanager
def forked(body: Callable[[Connection], None]) -> Iterator[tuple[int, Connection]]:
    """A child that has said that it is there, and is killed in the end."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=body, args=(there,))
    process.start()
    there.close()  # so that its death is seen, and not waited for
    try:
        assert here.recv() == "here"
        assert process.pid is not None
        yield process.pid, here
    finally:
        process.kill()
        process.join()


def deepest_user_line(pid: int, armed: Armed, line: str) -> str:
    """What it says when it has come to the line, asked again while it is on its way, or this machine busy."""
    source, found = Path(__file__).read_text().splitlines(), ""
    deadline = time.monotonic() + 10
    while line not in found and time.monotonic() < deadline:
        user = [frame for frame in ask(pid, armed, owner=os.getpid()) if frame.file == __file__]
        found = source[user[-1].line - 1] if user else ""
    return found


def test_the_signal_is_as_it_was_and_no_file_is_left() -> None:
    signals = {number: signal.getsignal(number) for number in REAL_TIME}
    caught, files = caught_signals(), open_files()
    traceback = TracebackSignal()
    armed = traceback.arm()
    assert armed is not None
    assert caught_signals() == caught | {armed.signum}
    assert len(open_files()) == len(files) + 1
    traceback.close()
    assert {number: signal.getsignal(number) for number in REAL_TIME} == signals
    assert caught_signals() == caught
    assert open_files() == files


def test_the_file_has_no_name_that_could_be_left(armed: Armed) -> None:
    assert os.fstat(armed.fd).st_nlink == 0


def caught_signals() -> set[int]:
    """Python knows nothing of what faulthandler does below it; the kernel does."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt:"))
    mask = int(line.split()[1], 16)
    return {number for number in range(1, signal.SIGRTMAX + 1) if mask >> (number - 1) & 1}


def open_files() -> list[str]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sorted(links)


def test_signals_that_others_use_are_left_alone(armed: Armed) -> None:
    """One is used from C, as is that of another guard of this process, one from Python, and one is ignored."""
    taken = signal.signal(armed.signum - 1, print)
    ignored = signal.signal(armed.signum - 2, signal.SIG_IGN)
    other = TracebackSignal()
    try:
        second = other.arm()
        assert second is not None
        assert armed.signum - second.signum not in (0, 1, 2)
        other.close()
        assert signal.getsignal(armed.signum - 1) is print
        assert armed.signum in caught_signals()
    finally:
        other.close()
        signal.signal(armed.signum - 1, taken)
        signal.signal(armed.signum - 2, ignored)


def test_close_may_come_twice_or_without_arm() -> None:
    traceback = TracebackSignal()
    traceback.close()
    traceback.arm()
    traceback.close()
    traceback.close()


def test_without_a_free_signal_nothing_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traceback_signal, "_free_signals", list)
    before = open_files()
    assert TracebackSignal().arm() is None
    assert open_files() == before


def wait(connection: Connection) -> None:
    connection.send("here")
    while True:
        connection.send(connection.recv())  # <- it waits here


def count_for_ever(connection: Connection) -> None:
    connection.send("here")
    sum(itertools.repeat(1, 10**12))  # <- a loop in C that keeps the GIL


def test_a_forked_child_says_where_it_waits(armed: Armed) -> None:
    with forked(wait) as (pid, _):
        assert deepest_user_line(pid, armed, "<- it").endswith("# <- it waits here")


def test_a_child_that_keeps_the_gil_answers_all_the_same(armed: Armed) -> None:
    with forked(count_for_ever) as (pid, _):
        assert deepest_user_line(pid, armed, "<- a loop").endswith("# <- a loop in C that keeps the GIL")


def test_an_answer_holds_the_frames_outermost_first_and_tells_the_users(armed: Armed) -> None:
    with forked(wait) as (pid, _):
        assert deepest_user_line(pid, armed, "<- it")
        stack = ask(pid, armed, owner=os.getpid())
    functions = [frame.function for frame in stack]
    assert functions.index("test_an_answer_holds_the_frames_outermost_first_and_tells_the_users") < functions.index(
        "wait"
    )
    assert {frame.user for frame in stack if frame.function == "wait"} == {True}
    assert {frame.user for frame in stack if frame.file == multiprocessing.connection.__file__} == {False}


def disarm_and_wait(connection: Connection) -> None:
    for number in REAL_TIME:
        faulthandler.unregister(number)
    wait(connection)


def test_a_process_that_would_die_of_the_signal_is_not_sent_it(armed: Armed) -> None:
    with forked(disarm_and_wait) as (pid, connection):
        assert ask(pid, armed, owner=os.getpid()) == ()
        connection.send("still there?")
        assert connection.recv() == "still there?"


def test_a_process_that_is_gone_does_not_answer(armed: Armed) -> None:
    with forked(wait) as (pid, _):
        pass
    assert ask(pid, armed) == ()


def test_an_earlier_answer_is_not_taken_for_this_one(armed: Armed, monkeypatch: pytest.MonkeyPatch) -> None:
    with forked(wait) as (pid, _):
        assert deepest_user_line(pid, armed, "<- it")
        monkeypatch.setattr(traceback_signal, "_ANSWER_S", 0.02)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert ask(pid, armed, owner=os.getpid()) == ()


ONE_THREAD = """\
Current thread 0x00007f0f8a4c5740 (most recent call first):
  File "/home/me/train.py", line 42 in training_step
  File "/home/me/train.py", line 60 in <module>
"""
TWO_THREADS = """\
Thread 0x00007f0f7b7fe6c0 (most recent call first):
  File "/lib/python3/threading.py", line 327 in wait

Current thread 0x00007f0f8a4c5740 (most recent call first):
  File "/home/me/train.py", line 42 in training_step
  File "/home/me/train.py", line 60 in <module>
Thread 0x00007f0f7affd6c0 (most recent call first):
  File "/home/me/other.py", line 1 in run
"""


def places(stack: tuple[Frame, ...]) -> list[tuple[str, int, str]]:
    return [(frame.file, frame.line, frame.function) for frame in stack]


EXPECTED = [("/home/me/train.py", 60, "<module>"), ("/home/me/train.py", 42, "training_step")]


@pytest.mark.parametrize(
    "text",
    [
        ONE_THREAD,
        TWO_THREADS,
        # Since Python 3.14 with the thread's name.
        TWO_THREADS.replace(" (most", " [pt_main (1)] (most"),
        # Without the GIL, nobody knows which thread is current; the main thread comes last.
        'Thread 0x01 (most recent call first):\n  File "/a.py", line 1 in f\n' + ONE_THREAD.replace("Current t", "T"),
        "Fatal Python error: whatever\n\n" + ONE_THREAD + "  ...\n\nExtension modules: numpy (total: 1)\n",
    ],
)
def test_the_stack_of_the_thread_that_was_asked(text: str) -> None:
    assert places(parse(text)) == EXPECTED


def test_odd_names_are_read() -> None:
    text = 'Current thread 0x1 (most recent call first):\n  File "/a "b", line 3 in c.py", line 4 in <lambda> in x\n'
    (frame,) = parse(text)
    assert (frame.line, frame.file) == (4, '/a "b", line 3 in c.py')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0\xff�\n\n",
        '  File "/a.py", line 1 in f\n',
        "Current thread 0x1 (most recent call first):\n  <no Python frame>\n",
        "Current thread 0x1 (most recent call first):\n  File ???, line ??? in ???\n",
        'Current thread 0x1 (most recent call first):\n  File "/a.py", line 1',
    ],
)
def test_garbage_has_no_frames(text: str) -> None:
    assert parse(text) == ()
