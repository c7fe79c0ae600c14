"""Python stacks of processes that cannot answer, by two signals; the handler of one works even while the GIL is held.

Each rank arms two real-time signals and a file in memory. A peer on the same host that finds it silent sends a signal
and reads the file through ``/proc/PID/fd``. Forked loader workers inherit all three, so a rank can ask its own workers
for their stacks.

The first signal has a handler in Python, which the main thread calls as soon as it is between two bytecodes. If it is
in C and does not call it, the second signal makes ``faulthandler`` write its frames from a C signal handler, without
the GIL. A thread that executes bytecode must not be sent that one: its frames may be half made, and about one in 2,000
of these signals ends a busy process with SIGSEGV (one in 20 if frames of other threads are read, too; measured with
Python 3.10 to 3.13). While the first signal is pending, a thread that leaves C calls its handler before anything else.

Some C code, such as that of regular expressions, calls the handler without releasing the GIL: that Python has answered
does not show that the GIL is free.

A rank that has not reached its Trainer yet cannot tell its peers about its signals. The import of the package arms
them, and the name of the file, which peers find among the rank's open files, contains their numbers.

``faulthandler`` also writes to that file when a fatal signal ends the process (``crash_file``), and ``sys.excepthook``
does with an uncaught exception: see ``crash_traces``.

There is no guard between two calls of the Trainer either, so an armed rank stays armed.
"""

import ctypes
import faulthandler
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.facts import COLLECTOR, Frame, codec
from lightning_ncclsafe.probes.process.crash_file import leave_crashes, take_crashes
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread
from lightning_ncclsafe.probes.process.open_files import files_in_memory
from lightning_ncclsafe.probes.process.stacks import exception_facts, seen_frame

# What faulthandler writes above the frames of a thread that collects garbage.
_COLLECTS = "  Garbage-collecting"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_ANSWER_S = 0.15
_POLL_S = 0.005
# Python looks for signals every few bytecodes. A thread that has run for so long since, or sleeps again after a while,
# is in C.
_RUNS_S, _SLEEPS_S = 0.005, 0.03
_NAME = "ncclsafe-traceback-"
_PARTS = re.compile(rf"{_NAME}(\d+)-(\d+)-(\d+)")
_HEAD = "(most recent call first)"
# Python writes this line below its frames. Workers write to the same file, some of them late.
_BY_PYTHON = "(by Python, process {pid})\n"
_ANY_BY_PYTHON = _BY_PYTHON.partition("{")[0]
# Environment variables of launchers: the number of the rank, and the number of ranks.
_LAUNCHED = (("LOCAL_RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))

RAISED = "Uncaught exception: "
"""In the file, precedes an uncaught exception as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """How a process is asked for its traceback, and where it writes it.

    Attributes:
        python_signum: The signal that Python handles; 0 if this process cannot be asked, as its signals were to be set
            in a thread other than the main one.
        c_signum: The signal that is handled in C; 0 as above.
        fd: File descriptor, in that process, of the file it writes to.
    """

    python_signum: int
    c_signum: int
    fd: int


class TracebackSignal:
    """Arms the signals in this process; :meth:`close` restores the state before."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._python_signum = self._c_signum = 0
        self._pid = 0
        self._is_of_rank = False
        self._hook_before = sys.excepthook

    def arm(self) -> Armed | None:
        """Arms two unused real-time signals, or re-arms the same ones; None where the platform has none."""
        if self._file is not None and not self._c_signum and _is_main_thread():
            self.close()  # it was set up in another thread, without signals
        if self._file is None:
            self._open()
        if self._file is None:
            return None
        # Lightning restores all signals through Python. That removes faulthandler's handler, of which Python does not
        # know, and calls of the system that our handler interrupts are no longer restarted.
        if self._c_signum and not _handles(os.getpid(), self._c_signum):
            faulthandler.unregister(self._c_signum)
            faulthandler.register(self._c_signum, file=self._file, all_threads=False)
        if self._python_signum and signal.getsignal(self._python_signum) in (signal.SIG_DFL, self._write):
            self._handle_in_python()
        return Armed(python_signum=self._python_signum, c_signum=self._c_signum, fd=self._file.fileno())

    def _open(self) -> None:
        free = _free_signals()
        if len(free) < 2 or not hasattr(os, "memfd_create"):  # not Linux, an old one, or a program that takes them all
            return
        self._python_signum, self._c_signum = free[:2] if _is_main_thread() else (0, 0)
        self._pid = os.getpid()
        # In memory: a signal handler must not wait for storage.
        file = os.memfd_create(f"{_NAME}{self._pid}-{self._python_signum}-{self._c_signum}")
        self._file = os.fdopen(file, "wb", buffering=0)
        # Read now: Lightning removes these variables when its Trainer ends.
        self._is_of_rank = _is_launched(os.environ)
        # Peers read it when this process is gone; see CrashTraces.
        take_crashes(self._file)
        self._hook_before, sys.excepthook = sys.excepthook, self._uncaught

    def _handle_in_python(self) -> None:
        with suppress(ValueError):  # in another thread than the main one
            signal.signal(self._python_signum, self._write)
            signal.siginterrupt(self._python_signum, False)

    @marked(Mark.ANSWER)
    def _write(self, *_: object) -> None:
        try:
            if self._file is not None:
                faulthandler.dump_traceback(self._file, all_threads=False)
                os.write(self._file.fileno(), _BY_PYTHON.format(pid=os.getpid()).encode())
        except Exception:  # in the midst of the user's code; nobody gets an answer then
            return

    def close(self) -> None:
        """Restores the signals and closes the file."""
        if self._file is not None:
            if self._c_signum:
                faulthandler.unregister(self._c_signum)
                with suppress(ValueError):  # in another thread than the main one
                    if signal.getsignal(self._python_signum) == self._write:
                        signal.signal(self._python_signum, signal.SIG_DFL)
            leave_crashes(self._file)
            # A hook that was set later may still call this one, which then only passes on.
            if sys.excepthook == self._uncaught:
                sys.excepthook = self._hook_before
            self._file.close()
            self._file = None

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Writes the exception to the file, where peers find it when this process is gone."""
        with suppress(Exception):
            if self._file is not None and not self.is_inherited:
                raised = codec.encode(exception_facts(error.with_traceback(trace), is_consequence=_is_of_others(error)))
                os.write(self._file.fileno(), f"\n{RAISED}".encode() + raised + b"\n")
        self._hook_before(kind, error, trace)

    @property
    def stays(self) -> bool:
        """Whether this process is one of several ranks, and so may have another guard later."""
        return self._is_of_rank and not self.is_inherited

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that armed it: then the file belongs to that one."""
        return self._pid not in (0, os.getpid())


_early = TracebackSignal()


def arm_early(environ: Mapping[str, str] = os.environ) -> None:
    """Arms the signals if a launcher started this process as one of several ranks; never raises.

    Args:
        environ: The environment variables.
    """
    if _is_launched(environ):
        with suppress(Exception):
            _early.arm()


def take_early() -> TracebackSignal:
    """The signals of this process, for its guard to arm and close: those armed at import, if there are any."""
    global _early
    taken, _early = _early, TracebackSignal()
    return TracebackSignal() if taken.is_inherited else taken


def leave(signal_: TracebackSignal) -> None:
    """Called when a guard ends. The signals of one of several ranks stay armed for the next guard."""
    global _early
    if signal_.stays:
        _early = signal_
        signal_.arm()
    else:
        signal_.close()


def _is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return any(_number(environ.get(rank)) >= 0 and _number(environ.get(size)) > 1 for rank, size in _LAUNCHED)


def _is_of_others(error: BaseException) -> bool:
    """Whether an exception only reports that a collective failed; without torch none does."""
    if "torch" not in sys.modules:
        return False
    from lightning_ncclsafe._torch import process_groups

    return process_groups.is_communication_error(error)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1


def armed_in(pid: int) -> Armed | None:
    """How another process of this user on this host is asked, by its open files; None if it is not armed."""
    for link, name in files_in_memory(pid):
        found = _PARTS.fullmatch(name)
        with suppress(OSError):  # closed meanwhile
            # It may have that of its parent, too, and those of its peers open to read.
            if found and int(found[1]) == pid and link.lstat().st_mode & stat.S_IWUSR:
                return Armed(python_signum=int(found[2]), c_signum=int(found[3]), fd=int(link.name))
    return None


def ask(pid: int, armed: Armed, *, owner: int | None = None) -> tuple[Frame, ...]:
    """Asks another process of this user on this host for its main thread's stack. Takes up to 0.3 s.

    Args:
        pid: The process to ask.
        armed: How it is asked, and where it writes.
        owner: The process whose file descriptor ``armed.fd`` is, if not ``pid`` itself: a worker writes to the file
            of the rank that forked it.

    Returns:
        Its frames, outermost first; nothing where the process does not handle the signals (it would die of them) or
        gets no time on a core to do so.
    """
    path = Path(f"/proc/{owner or pid}/fd/{armed.fd}")
    try:
        if not (_handles(pid, armed.python_signum) and _handles(pid, armed.c_signum)):
            return ()
        before, began = path.stat().st_size, look_at_main_thread(pid)
        _send(pid, armed.python_signum)
        written = _wait_for_python(pid, path, before, began)
        if _is_whole(written, pid):
            return _above_handler(_stack_of_main(written))
        if not _is_in_c(began, look_at_main_thread(pid)) or not _handles(pid, armed.c_signum):
            return ()
        size = path.stat().st_size
        _send(pid, armed.c_signum)
        _wait_for_c(path, size)
        written = _read(path, before)
    except OSError:
        return ()
    return _answer_to_both(written, pid)


def _answer_to_both(written: str, pid: int) -> tuple[Frame, ...]:
    """The stack, if both signals were sent: Python may have answered after all."""
    if _ANY_BY_PYTHON not in written:
        return _above_handler(_stack_of_main(written))
    # If it was about to, or another process has, the lines are mixed.
    of_c, head, by_python = written.rpartition(_HEAD)
    earlier = _stack_of_main(of_c)
    is_apart = bool(earlier) and not _has_handler(earlier) and _ANY_BY_PYTHON not in of_c
    is_its = by_python.endswith(_BY_PYTHON.format(pid=pid))
    return _above_handler(_stack_of_main(head + by_python)) if is_apart and is_its else ()


def _is_whole(written: str, pid: int) -> bool:
    """Whether Python has answered; another peer may have asked before, and only the end of that answer be in here."""
    return _HEAD in written and written.endswith(_BY_PYTHON.format(pid=pid))


def _send(pid: int, signum: int) -> None:
    """Sends a signal to the main thread: sent to the process, another thread may take it, and write its own stack."""
    if _tgkill() is None:
        os.kill(pid, signum)
    elif _tgkill()(pid, pid, signum):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@cache
def _tgkill() -> Any:
    """The C library's function; None where it has none (glibc before 2.30)."""
    return getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _wait_for_python(pid: int, path: Path, before: int, began: ThreadLook) -> str:
    """What is written until it is complete, or the main thread has turned out to be in C."""
    began_s, written = time.monotonic(), ""
    while not _is_whole(written, pid) and time.monotonic() < began_s + _ANSWER_S:
        time.sleep(_POLL_S)
        if path.stat().st_size > before:
            written = _read(path, before)
        elif time.monotonic() > began_s + _SLEEPS_S and _is_in_c(began, look_at_main_thread(pid)):
            break
    return written


def _is_in_c(began: ThreadLook, now: ThreadLook) -> bool:
    """Whether a main thread that has not called a Python handler since is in C: it sleeps, or has run for a while.

    In uninterruptible sleep it has not even received the signal, and could not answer another one.
    """
    return now.is_interruptible or (now.is_running and (now.ran_s or 0.0) - (began.ran_s or 0.0) >= _RUNS_S)


def _above_handler(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames of the program alone, without that of the handler and those that it calls."""
    return tuple(takewhile(lambda frame: frame.mark != Mark.ANSWER, stack))


def _has_handler(stack: tuple[Frame, ...]) -> bool:
    return any(frame.mark == Mark.ANSWER for frame in stack)


def _stack_of_main(text: str) -> tuple[Frame, ...]:
    return next(iter(parse_threads(text)), ())


def parse_threads(text: str) -> list[tuple[Frame, ...]]:
    """The threads' stacks in faulthandler's text, outermost frame first; the main thread's stack is first.

    The thread that handles the signal is called "Current thread"; without one, the main thread comes last. Garbage
    collection appears as a frame of its own, the innermost.
    """
    threads: list[list[Frame]] = []
    current = -1
    for line in text.splitlines():
        if _HEAD in line:
            current = len(threads) if line.startswith("Current thread") else current
            threads.append([])
        elif threads and (frame := _frame(line)) is not None:
            threads[-1].append(frame)
    main = threads.pop(current) if threads else []
    return [tuple(reversed(thread)) for thread in (main, *threads)]


def _frame(line: str) -> Frame | None:
    if line.startswith(_COLLECTS):
        return Frame(file=COLLECTOR, line=0, function="collect")
    found = _FRAME.match(line)
    if found is None:
        return None
    return seen_frame(found["file"], int(found["line"]), found["function"])


def _wait_for_c(path: Path, before: int) -> None:
    """Waits until the file has grown and stopped growing; its size is all that can be watched across processes."""
    deadline = time.monotonic() + _ANSWER_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(2 * _POLL_S)
        grown = path.stat().st_size
        if grown > before and grown == size:
            break
        size = grown


def _read(path: Path, begin: int) -> str:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(1 << 20).decode("utf-8", "replace")


def _handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal: without one, the signal would kill it."""
    return signum > 0 and bool(_caught(pid) >> (signum - 1) & 1)


def _caught(pid: int) -> int:
    """The signals that a process catches, as bits (``SigCgt`` in ``/proc/PID/status``)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return int(line.split()[1], 16)
    return 0


def _free_signals() -> list[int]:
    """Real-time signals at their default action, highest first: runtimes that use some take the low ones."""
    first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
    with suppress(ValueError, OSError):
        # Python does not know of handlers that C code installed, such as faulthandler's.
        caught = _caught(os.getpid())
        at_default = [number for number in range(last - 1, first, -1) if signal.getsignal(number) is signal.SIG_DFL]
        return [number for number in at_default if not caught >> (number - 1) & 1]
    return []
