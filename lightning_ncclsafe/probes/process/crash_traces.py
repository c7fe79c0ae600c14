"""What a dead process of this host left: its stack at a fatal signal, its exception, why it aborted, its last place.

``faulthandler`` writes to the file of ``traceback_signal`` when a fatal signal (SIGABRT, SIGSEGV, SIGBUS, SIGFPE,
SIGILL) ends the process; ``sys.excepthook`` writes an uncaught exception there. A peer that opened the file earlier can
read it after the process is gone; otherwise the file is gone, too. The reason of an abort is on stderr: if that is a
file, its end is read.
"""

import os
import re
import stat
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from lightning_ncclsafe.code.side_thread import NoThreadError, SideThread
from lightning_ncclsafe.facts import ExceptionFacts, Frame, LastSeen, codec
from lightning_ncclsafe.probes.process.last_seen import open_last_seen, read_last_seen
from lightning_ncclsafe.probes.process.stacks import stack_in_collective
from lightning_ncclsafe.probes.process.traceback_signal import RAISED, armed_in, parse_threads

T = TypeVar("T")

_FATAL = "Fatal Python error: "
_SIGNALS = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_MOST_BYTES = 1 << 20
_STDERR = 2
# The longest wait for the storage of a stderr: unless the storage is dead, the file is in the page cache.
_STDERR_S = 0.2
# The end of a file is enough: an aborting process writes nothing afterwards, its peers a traceback or two.
_TAIL_BYTES = 1 << 17
_MOST_SAID = 300
# Frames that it writes of each thread, the innermost ones.
_MOST_OF_FAULTHANDLER = 100
# From an uncaught C++ exception, an assertion, and the C library's own checks.
_WHY = re.compile(
    r"^\s*what\(\):\s*(.+)$|^(.*: Assertion .+ failed\.)$|^((?:malloc|free|realloc)\w*\(\): .+)$", re.MULTILINE
)
_AFTERWARDS = re.compile(r"\n\n(?:Extension modules|Current thread's C stack)")


class CrashTrace(NamedTuple):
    """What a dead process left.

    Attributes:
        signal: The signal that ended it, ``"SIGABRT"``; empty if none is known.
        stack: Stack of its main thread.
        said: The reason of its abort: the last reason that it, or another process with the same stderr, wrote.
        thread_stack: Stack of another thread that was in a collective; empty if none was.
    """

    signal: str
    stack: tuple[Frame, ...]
    said: str = ""
    thread_stack: tuple[Frame, ...] = ()


class CrashTraces:
    """Holds the files of the other ranks of this host. Never waits long for the storage of a stderr."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._places: dict[int, int] = {}
        # With the size of each when it was opened.
        self._stderr: dict[int, tuple[int, int]] = {}
        self._storage = SideThread("ncclsafe-stderr")
        # The look of a peer may be left behind on its thread.
        self._lock = threading.Lock()
        self._is_closed = False

    def hold(self, pids: Iterable[int]) -> None:
        """Opens the files of processes, so that they can be read when these have ended."""
        new: list[int] = []
        with self._lock:
            for pid in pids if not self._is_closed else ():
                self._hold_place(pid)
                if pid not in self._files and (armed := armed_in(pid)) is not None:
                    new.append(pid)
                    with suppress(OSError):
                        self._files[pid] = _open(pid, armed.fd)
        if new:
            self._from_storage(lambda: self._hold_stderr(new))

    def _hold_place(self, pid: int) -> None:
        held = self._places.get(pid)
        with suppress(OSError):  # a program may close all descriptors
            # An empty one is that of an earlier call of the Trainer, or of one that has just begun.
            if (held is None or not os.fstat(held).st_size) and (place := open_last_seen(pid)) is not None:
                self._places[pid] = place
                if held is not None:
                    os.close(held)

    def _hold_stderr(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(OSError):
                # Opening a pipe or a terminal would take its contents from its reader.
                if pid not in self._stderr and stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{_STDERR}").st_mode):
                    file = _open(pid, _STDERR)
                    self._stderr[pid] = file, os.fstat(file).st_size
        if self._is_closed:  # meanwhile
            self.close()

    def of(self, pid: int) -> CrashTrace:
        """What a dead process left."""
        found = CrashTrace("", ())
        with suppress(OSError, KeyError):
            found = parse_crash(_text(self._files[pid], 0, _MOST_BYTES))
        if found.signal in ("", "SIGABRT") and pid in self._stderr:
            return found._replace(said=self._from_storage(lambda: self._said(pid)) or "")
        return found

    def _said(self, pid: int) -> str:
        file, began = self._stderr[pid]
        return why(_text(file, max(began, os.fstat(file).st_size - _TAIL_BYTES), _TAIL_BYTES))

    def _from_storage(self, read: Callable[[], T]) -> T | None:
        with suppress(OSError, KeyError, NoThreadError):
            return self._storage.call(read, _STDERR_S)
        return None

    def raised(self, pid: int) -> ExceptionFacts | None:
        """The uncaught exception of a process that is dead or about to end; None without one."""
        with suppress(OSError, KeyError, codec.DecodeError):
            found = _text(self._files[pid], 0, _MOST_BYTES).rpartition(f"\n{RAISED}")
            return codec.decode(ExceptionFacts, found[2].partition("\n")[0].encode()) if found[1] else None
        return None

    def last_seen(self, pid: int) -> LastSeen | None:
        """Where a dead process was shortly before it ended; None if that is unknown."""
        place = self._places.get(pid)
        return read_last_seen(place) if place is not None else None

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            self._is_closed = True
        held = [*self._files.values(), *self._places.values(), *(file for file, _ in self._stderr.values())]
        self._files, self._places, self._stderr = {}, {}, {}
        for file in held:
            with suppress(OSError):
                os.close(file)


def _open(pid: int, fd: int) -> int:
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def _text(file: int, offset: int, most_bytes: int) -> str:
    return os.pread(file, most_bytes, offset).decode("utf-8", "replace")


def why(text: str) -> str:
    """Why a process aborted itself, from the last line of its stderr that gives a reason; empty if none does."""
    reasons = [next(filter(None, found.groups())) for found in _WHY.finditer(text)]
    return reasons[-1].strip()[:_MOST_SAID] if reasons else ""


def parse_crash_of_fork(text: str, signal: str, depth: int) -> tuple[Frame, ...]:
    """The stack of the thread in which this signal struck a forked child, without the frames of its parent.

    Args:
        text: What ``faulthandler`` has written.
        depth: How many frames of the child's first thread, which has forked, are the parent's.

    Returns:
        The stack, outermost frame first; empty if the trace is of another signal, or of no Python thread, or cut off.
    """
    reason, threads = _fatal_error(text)
    _, mark, current = (threads or "").rpartition("Current thread")
    if not mark or _SIGNALS.get(reason) != signal:
        return ()
    # The first thread comes last.
    stack, *others = parse_threads(mark + current)
    if others:
        return stack
    return stack[depth:] if len(stack) < _MOST_OF_FAULTHANDLER else ()


def parse_crash(text: str) -> CrashTrace:
    """The fatal error in what ``faulthandler`` has written; tracebacks that were asked for precede it."""
    reason, threads = _fatal_error(text)
    if threads is None:
        return CrashTrace(_SIGNALS.get(reason, ""), ())
    # The main thread's stack is last, whichever thread the signal struck.
    main, *others = parse_threads(threads.replace("Current thread", "Thread"))
    return CrashTrace(_SIGNALS.get(reason, reason[:40]), main, thread_stack=stack_in_collective(others))


def _fatal_error(text: str) -> tuple[str, str | None]:
    """The reason of the first fatal error, and the threads below it; None if there is none, or they are not complete.

    Other threads run on while an aborting thread writes, and may crash that.
    """
    _, mark, first = text.partition(_FATAL)
    reason, _, threads = first.partition("\n")
    return reason.strip(), _AFTERWARDS.split(threads)[0] if mark and _FATAL not in threads else None
