"""Stacks of processes that cannot answer for themselves: forked children, asked by signal."""

import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from polling import until

from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import COLLECTOR, Frame
from lightning_ncclsafe.probes.process import traceback_signal
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread
from lightning_ncclsafe.probes.process.traceback_signal import (
    Armed,
    TracebackSignal,
    arm_early,
    armed_in,
    ask,
    leave,
    parse_threads,
    take_early,
)

FORK = multiprocessing.get_context("fork")


def parse(text: str) -> tuple[Frame, ...]:
    """The main thread's stack."""
    return next(iter(parse_threads(text)), ())


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
    source = Path(__file__).read_text().splitlines()

    def found() -> str:
        user = [frame for frame in ask(pid, armed, owner=os.getpid()) if frame.file == __file__]
        deepest = source[user[-1].line - 1] if user else ""
        return deepest if line in deepest else ""

    return until(found)


def test_closing_restores_the_signal_and_leaves_no_file() -> None:
    signals = {number: signal.getsignal(number) for number in REAL_TIME}
    caught, files = caught_signals(), open_files()
    traceback = TracebackSignal()
    armed = traceback.arm()
    assert armed is not None
    assert caught_signals() == caught | {armed.python_signum, armed.c_signum}
    assert len(open_files()) == len(files) + 1
    traceback.close()
    assert {number: signal.getsignal(number) for number in REAL_TIME} == signals
    assert caught_signals() == caught
    assert open_files() == files


def test_the_file_has_no_name_on_disk(armed: Armed) -> None:
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


def test_signals_used_by_others_are_left_alone(armed: Armed) -> None:
    """One signal is used from C, like that of another guard of this process, one from Python, and one is ignored."""
    taken = signal.signal(armed.c_signum - 1, print)
    ignored = signal.signal(armed.c_signum - 2, signal.SIG_IGN)
    other = TracebackSignal()
    try:
        second = other.arm()
        assert second is not None
        assert max(second.python_signum, second.c_signum) < armed.c_signum - 2
        other.close()
        assert signal.getsignal(armed.c_signum - 1) is print
        assert {armed.python_signum, armed.c_signum} <= caught_signals()
    finally:
        other.close()
        signal.signal(armed.c_signum - 1, taken)
        signal.signal(armed.c_signum - 2, ignored)


def test_the_signal_of_a_rank_stays_for_the_next_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning resets all signals to the handlers Python knows, and removes the rank variables again."""
    for name, value in {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    traceback = TracebackSignal()
    armed = traceback.arm()
    try:
        assert armed is not None and signums(armed) <= caught_signals()
        monkeypatch.delenv("WORLD_SIZE")
        reset_all(armed)
        leave(traceback)
        assert signums(armed) <= caught_signals()
        reset_all(armed)
        assert take_early() is traceback and traceback.arm() == armed
        assert signums(armed) <= caught_signals()
    finally:
        traceback.close()


def test_calls_of_the_system_are_restarted_again_once_lightning_has_restored_all_handlers(armed: Armed) -> None:
    """It restores them through Python, which has C code see interrupted calls from then on."""
    flags = SigAction()
    traceback = TracebackSignal()
    own = traceback.arm()
    try:
        assert own is not None and flags.restarts(own.python_signum)
        signal.signal(own.python_signum, signal.getsignal(own.python_signum))
        assert not flags.restarts(own.python_signum)
        assert traceback.arm() == own and flags.restarts(own.python_signum)
    finally:
        traceback.close()


def test_a_signal_set_up_in_a_thread_is_set_up_anew_in_the_main_thread() -> None:
    traceback = TracebackSignal()
    thread = threading.Thread(target=traceback.arm)
    thread.start()
    thread.join()
    try:
        armed = traceback.arm()
        assert armed is not None and signums(armed) <= caught_signals() and armed_in(os.getpid()) == armed
    finally:
        traceback.close()


def test_the_signal_of_a_program_without_ranks_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    hook, traceback = sys.excepthook, TracebackSignal()
    armed = traceback.arm()
    assert armed is not None and sys.excepthook != hook
    leave(traceback)
    assert not signums(armed) & caught_signals() and sys.excepthook == hook


def test_close_works_twice_or_without_arm() -> None:
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


class SigAction:
    """The C library's ``sigaction``, whose flags Python does not show."""

    SA_RESTART = 0x10000000

    def restarts(self, signum: int) -> bool:
        """Whether calls of the system that this signal interrupts are restarted."""
        # The handler, 1,024 bits of signals, and the flags.
        action = ctypes.create_string_buffer(256)
        assert ctypes.CDLL(None).sigaction(signum, None, action) == 0
        return bool(int.from_bytes(action[136:140], sys.byteorder) & self.SA_RESTART)


def signums(armed: Armed) -> set[int]:
    return {armed.python_signum, armed.c_signum}


def reset_all(armed: Armed) -> None:
    for signum in signums(armed):
        signal.signal(signum, signal.SIG_DFL)


SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "is_rank"),
    [
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, True),
        (SLURM, True),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"LOCAL_RANK": "0"}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "many"}, False),
        (SLURM | {"SLURM_NTASKS": "1"}, False),
        ({}, False),
    ],
)
def test_a_rank_is_armed_before_it_has_a_guard(environment: dict[str, str], is_rank: bool) -> None:
    caught, files = caught_signals(), open_files()
    arm_early(environment)
    signal_of_guard = take_early()
    try:
        assert (len(caught_signals()), len(open_files())) == (len(caught) + 2 * is_rank, len(files) + is_rank)
        early = armed_in(os.getpid())
        assert (early is not None) == is_rank
        armed = signal_of_guard.arm()
        # What it has been is what its guard goes on with.
        assert armed is not None and armed == (early or armed)
        assert len(caught_signals()) == len(caught) + 2
    finally:
        signal_of_guard.close()
    assert (caught_signals(), open_files()) == (caught, files)


def arm_as_a_rank(connection: Connection) -> None:
    arm_early(SLURM)
    taken = take_early()
    connection.send((armed_in(os.getpid()), taken.arm(), taken.is_inherited))


def test_a_forked_rank_keeps_its_own_signal() -> None:
    """As when a server imports the package and forks the ranks."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=arm_as_a_rank, args=(there,))
    process.start()
    early, armed, is_inherited = here.recv()
    process.join()
    assert early is not None and armed == early
    assert not is_inherited


def test_a_failure_to_arm_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[int]:
        raise RuntimeError("no signals here")

    monkeypatch.setattr(traceback_signal, "_free_signals", fail)
    arm_early(SLURM)
    assert armed_in(os.getpid()) is None


def arm_again(connection: Connection) -> None:
    taken = take_early()
    connection.send((taken.arm(), taken.is_inherited))
    connection.recv()


def test_a_fork_does_not_inherit_its_parents_signal() -> None:
    arm_early(SLURM)
    of_parent = armed_in(os.getpid())
    here, there = FORK.Pipe()
    process = FORK.Process(target=arm_again, args=(there,))
    process.start()
    try:
        of_child, is_inherited = here.recv()
        assert of_child is not None and of_parent is not None
        assert not is_inherited
        assert not signums(of_child) & signums(of_parent)
    finally:
        process.kill()
        process.join()
        take_early().close()


def test_without_files_in_memory_nothing_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    before = caught_signals(), open_files()
    assert TracebackSignal().arm() is None
    assert (caught_signals(), open_files()) == before


def test_a_dead_process_is_not_armed() -> None:
    with forked(wait) as (pid, _):
        pass
    assert armed_in(pid) is None


IMPORTS = """
import sys
import lightning_ncclsafe
def expand():
    print(*[name for name in ("torch", "lightning", "psutil") if name in sys.modules], flush=True)
    sys.stdin.read()
expand()
"""


def test_a_rank_answers_once_it_has_imported_the_package() -> None:
    """Long before it has a Trainer, and without any heavy import."""
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTS],
        env=os.environ | {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        armed = armed_in(process.pid)
        assert armed is not None
        functions = until(lambda: tuple(frame.function for frame in ask(process.pid, armed)))
        assert functions[:2] == ("<module>", "expand")
    finally:
        process.communicate()
    assert process.returncode == 0


def wait(connection: Connection) -> None:
    connection.send("here")
    while True:
        connection.send(connection.recv())  # <- it waits here


def count_for_ever(connection: Connection) -> None:
    connection.send("here")
    sum(itertools.repeat(1, 10**12))  # <- a loop in C that keeps the GIL


def call_for_ever(connection: Connection) -> None:
    def call(depth: int) -> int:
        return call(depth - 1) if depth else 0

    connection.send("here")
    while True:
        call(50)


def poll_for_ever(connection: Connection) -> None:
    connection.send("here")
    while True:
        time.sleep(0.01)


@pytest.fixture
def sent(armed: Armed, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The signals that are sent from now on, by who handles them."""
    names, send = {armed.python_signum: "python", armed.c_signum: "c"}, traceback_signal._send
    sent: list[str] = []

    def note(pid: int, signum: int) -> None:
        sent.append(names[signum])
        send(pid, signum)

    monkeypatch.setattr(traceback_signal, "_send", note)
    return sent


@pytest.mark.parametrize("body", [call_for_ever, poll_for_ever])
def test_a_process_in_which_python_answers_is_sent_no_signal_that_is_handled_in_c(
    armed: Armed, sent: list[str], body: Callable[[Connection], None]
) -> None:
    """Which may end it, if it executes bytecode at that moment."""
    with forked(body) as (pid, _):
        stacks = until(lambda: [stack for _ in range(20) if (stack := ask(pid, armed, owner=os.getpid()))])
        assert Mark.ANSWER not in {frame.mark for stack in stacks for frame in stack}
        functions = {frame.function for stack in stacks for frame in stack if frame.file == __file__}
        assert body.__name__ in functions
    assert "python" in sent and "c" not in sent


def test_a_process_that_gets_no_time_on_a_core_is_sent_no_signal_that_is_handled_in_c(
    armed: Armed, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = ThreadLook(state="running", ran_s=7.0)
    with forked(count_for_ever) as (pid, _):
        until(lambda: ask(pid, armed, owner=os.getpid()) and sent[-1] == "c")
        sent.clear()
        monkeypatch.setattr(traceback_signal, "_ANSWER_S", 0.05)
        monkeypatch.setattr(traceback_signal, "look_at_main_thread", lambda pid: starved)
        assert ask(pid, armed, owner=os.getpid()) == ()
    assert sent == ["python"]


# Its main thread waits in the kernel, as for dead storage: until a child that has its memory ends, as after vfork().
WAITS_FOR_ITS_CHILD = """
import ctypes, threading
from lightning_ncclsafe.probes.process.traceback_signal import TracebackSignal
TracebackSignal().arm()
threading.Thread(target=threading.Event().wait, daemon=True).start()
libc, stack = ctypes.CDLL(None), ctypes.create_string_buffer(1 << 16)
top = ctypes.addressof(stack) + (1 << 16) - 64 & ~15
CLONE_VM, CLONE_VFORK, SIGCHLD = 0x100, 0x4000, 17
print(flush=True)
libc.clone(ctypes.cast(libc.sleep, ctypes.c_void_p), ctypes.c_void_p(top), CLONE_VM | CLONE_VFORK | SIGCHLD, 60)
"""


def test_a_process_in_uninterruptible_sleep_is_sent_one_signal_only(
    armed: Armed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread would take the second one, and answer in place of the main thread."""
    sent, send = list[int](), traceback_signal._send
    monkeypatch.setattr(traceback_signal, "_send", lambda pid, signum: (sent.append(signum), send(pid, signum)))
    command = [sys.executable, "-c", WAITS_FOR_ITS_CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            until(lambda: look_at_main_thread(process.pid).is_blocked)
            its = armed_in(process.pid)
            assert its is not None and ask(process.pid, its) == ()
            assert sent == [its.python_signum]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_process_in_c_answers_to_the_second_signal(armed: Armed, sent: list[str]) -> None:
    with forked(count_for_ever) as (pid, _):
        until(lambda: ask(pid, armed, owner=os.getpid()) and sent[-2:] == ["python", "c"])


def test_an_answer_of_another_worker_is_not_taken(armed: Armed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was asked before, and was in C then."""
    monkeypatch.setattr(traceback_signal, "_ANSWER_S", 0.05)
    with forked(wait) as (other, _), forked(wait) as (pid, _):
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        send = traceback_signal._send
        monkeypatch.setattr(traceback_signal, "_send", lambda _, signum: send(other, signum))
        assert ask(pid, armed, owner=os.getpid()) == ()
        monkeypatch.setattr(traceback_signal, "_send", send)
        assert until(lambda: ask(other, armed, owner=os.getpid()))


def test_a_signal_set_up_in_a_thread_is_never_sent() -> None:
    """Python's handlers can be set in the main thread only; what ends the process is written all the same."""
    traceback, armed = TracebackSignal(), list[Armed | None]()
    caught, files = caught_signals(), open_files()
    thread = threading.Thread(target=lambda: armed.append(traceback.arm()))
    thread.start()
    thread.join()
    try:
        (of_thread,) = armed
        assert of_thread is not None and signums(of_thread) == {0}
        assert caught_signals() == caught
        assert len(open_files()) == len(files) + 1
        assert ask(os.getpid(), of_thread) == ()
    finally:
        traceback.close()


def test_a_forked_child_answers_with_its_line(armed: Armed) -> None:
    with forked(wait) as (pid, _):
        assert deepest_user_line(pid, armed, "<- it").endswith("# <- it waits here")


def test_a_child_that_holds_the_gil_still_answers(armed: Armed) -> None:
    with forked(count_for_ever) as (pid, _):
        assert deepest_user_line(pid, armed, "<- a loop").endswith("# <- a loop in C that keeps the GIL")


def test_an_answer_has_frames_outermost_first_and_marks_user_code(armed: Armed) -> None:
    with forked(wait) as (pid, _):
        assert deepest_user_line(pid, armed, "<- it")
        stack = ask(pid, armed, owner=os.getpid())
    functions = [frame.function for frame in stack]
    assert functions.index("test_an_answer_has_frames_outermost_first_and_marks_user_code") < functions.index("wait")
    assert {frame.user for frame in stack if frame.function == "wait"} == {True}
    assert {frame.user for frame in stack if frame.file == multiprocessing.connection.__file__} == {False}


def disarm_and_wait(connection: Connection) -> None:
    for number in REAL_TIME:
        faulthandler.unregister(number)
    wait(connection)


def test_a_process_without_a_handler_is_not_signalled(armed: Armed) -> None:
    with forked(disarm_and_wait) as (pid, connection):
        assert ask(pid, armed, owner=os.getpid()) == ()
        connection.send("still there?")
        assert connection.recv() == "still there?"


def test_a_dead_process_does_not_answer(armed: Armed) -> None:
    with forked(wait) as (pid, _):
        pass
    assert ask(pid, armed) == ()


def test_an_earlier_answer_is_not_reused(armed: Armed, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_stack_of_the_asked_thread_is_parsed(text: str) -> None:
    assert places(parse(text)) == EXPECTED


OF_HANDLER = (
    f'  File "{traceback_signal.__file__}", line {TracebackSignal._write.__code__.co_firstlineno + 3} in _write\n'
)
OF_C = ONE_THREAD.replace("Current thread 0x00007f0f8a4c5740", "Stack").replace("training_step", "validation_step")
OF_PYTHON = OF_C.replace("validation_step", "training_step").replace("first):\n", f"first):\n{OF_HANDLER}")
OF_HEAD, OF_REST = OF_PYTHON.partition(OF_HANDLER)[0] + OF_HANDLER, OF_PYTHON.partition(OF_HANDLER)[2]
WRITTEN = "(by Python, process 7)\n"


def test_faulthandler_begins_the_stack_of_one_thread_like_this() -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        assert file.readline().decode() == OF_C.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("written", "innermost"),
    [
        pytest.param(OF_C, "validation_step", id="c-alone"),
        pytest.param(OF_C + OF_PYTHON + WRITTEN, "training_step", id="python-later"),
        pytest.param(OF_PYTHON, "training_step", id="c-in-the-handler"),
        pytest.param(OF_PYTHON[:90] + OF_PYTHON + OF_PYTHON[90:] + WRITTEN, "", id="c-amid-the-first-line"),
        pytest.param(OF_HEAD + OF_PYTHON + OF_REST + WRITTEN, "", id="c-amid-what-python-writes"),
        pytest.param(OF_C + OF_PYTHON, "training_step", id="python-not-yet-done"),
        pytest.param(OF_C + OF_PYTHON + WRITTEN.replace("7", "8"), "", id="python-of-another-worker"),
        pytest.param(OF_PYTHON + WRITTEN.replace("7", "8") + OF_C, "", id="another-worker-before"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_both_answers_are_kept_apart(written: str, innermost: str) -> None:
    stack = traceback_signal._answer_to_both(written, 7)
    assert ([frame.function for frame in stack] or [""])[-1] == innermost


def test_odd_names_are_parsed() -> None:
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
def test_invalid_text_has_no_frames(text: str) -> None:
    assert parse(text) == ()


def test_a_garbage_collecting_thread_has_a_frame_for_it() -> None:
    text = ONE_THREAD.replace("(most recent call first):\n", "(most recent call first):\n  Garbage-collecting\n")
    assert places(parse(text)[:-1]) == EXPECTED
    assert (parse(text)[-1].file, parse(text)[-1].user) == (COLLECTOR, False)


def test_all_threads_are_parsed_main_thread_first() -> None:
    main, *others = parse_threads(TWO_THREADS)
    assert places(main) == EXPECTED
    assert [stack[-1].function for stack in others] == ["wait", "run"]
