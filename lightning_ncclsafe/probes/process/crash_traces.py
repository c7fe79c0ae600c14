"""What a process of this host has left when it is gone: its stack at a fatal signal, its exception, and why it aborted.

``faulthandler`` writes to the file of ``traceback_signal`` when a fatal signal (SIGABRT, SIGSEGV, SIGBUS, SIGFPE,
SIGILL) ends the process, and so does a hook of ours with an exception that nobody has caught. A peer that opened the
file before can read it when the process is gone; when nobody holds it, the file is gone, too. Why a process aborted
itself is on its stderr: if that is a file, its end is read.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from lightning_ncclsafe.code.side_thread import NoThreadError, SideThread
from lightning_ncclsafe.facts import ExceptionFacts, Frame, codec
from lightning_ncclsafe.probes.process.stacks import calling
from lightning_ncclsafe.probes.process.traceback_signal import RAISED, parse_threads

_SAID = "Fatal Python error: "
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
# How long the storage that a stderr is on may take: a file that is not dead is in memory.
_STDERR_S = 0.2
# The end of a file is enough: a process that aborts writes nothing afterwards, its peers a traceback or two.
_TAIL_BYTES = 1 << 17
_MOST_SAID = 300
# Of an exception that nobody has caught, of the C library's own checks, and of its assertions.
_WHY = re.compile(
    r"^\s*what\(\):\s*(.+)$|^(.*: Assertion .+ failed\.)$|^((?:malloc|free|realloc)\w*\(\): .+)$", re.MULTILINE
)
_AFTERWARDS = re.compile(r"\n\n(?:Extension modules|Current thread's C stack)")


class CrashTrace(NamedTuple):
    """What a process that is gone has left.

    Attributes:
        signal: The signal that has ended it, ``"SIGABRT"``; empty where none is known.
        stack: Where its main thread was.
        said: Why it has aborted itself, as it, or another process that writes to the same file, has said last.
        thread_stack: Where another thread of its was in a collective.
    """

    signal: str
    stack: tuple[Frame, ...]
    said: str = ""
    thread_stack: tuple[Frame, ...] = ()


class CrashTraces:
    """Holds the files of the other ranks of this host. Storage that a stderr is on is not waited for."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._stderr: dict[int, tuple[int, int]] = {}
        self._storage = SideThread("ncclsafe-stderr")
        self._is_closed = False

    def hold(self, processes: Iterable[tuple[int, int]]) -> None:
        """Opens the files of processes, by process id and by file descriptor in that process; -1 where it has none."""
        new = [(pid, fd) for pid, fd in processes if fd >= 0 and pid not in self._files]
        for pid, fd in new:
            with suppress(OSError):
                self._files[pid] = _open(pid, fd)
        if new:
            self._from_storage(lambda: self._hold_stderr([pid for pid, _ in new]))

    def _hold_stderr(self, pids: Iterable[int]) -> str:
        for pid in pids:
            with suppress(OSError):
                # A pipe or a terminal would be opened anew, and what is read of it would be lost to whoever reads it.
                if pid not in self._stderr and stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{_STDERR}").st_mode):
                    file = _open(pid, _STDERR)
                    self._stderr[pid] = file, os.fstat(file).st_size
        if self._is_closed:  # meanwhile
            self.close()
        return ""

    def of(self, pid: int) -> CrashTrace:
        """What a process that is gone has written last."""
        found = CrashTrace("", ())
        with suppress(OSError, KeyError):
            found = parse_crash(_text(self._files[pid], 0, _MOST_BYTES))
        if found.signal in ("", "SIGABRT") and pid in self._stderr:
            return found._replace(said=self._from_storage(lambda: self._said(pid)))
        return found

    def _said(self, pid: int) -> str:
        file, began = self._stderr[pid]
        return why(_text(file, max(began, os.fstat(file).st_size - _TAIL_BYTES), _TAIL_BYTES))

    def _from_storage(self, read: Callable[[], str]) -> str:
        with suppress(OSError, KeyError, NoThreadError):
            return self._storage.call(read, _STDERR_S)
        return ""

    def raised(self, pid: int) -> ExceptionFacts | None:
        """The exception that has left the program of a process, be it gone or about to end; None without one."""
        with suppress(OSError, KeyError, codec.DecodeError):
            found = _text(self._files[pid], 0, _MOST_BYTES).rpartition(f"\n{RAISED}")
            return codec.decode(ExceptionFacts, found[2].partition("\n")[0].encode()) if found[1] else None
        return None

    def close(self) -> None:
        """Gives the files back."""
        self._is_closed = True
        held = [*self._files.values(), *(file for file, _ in self._stderr.values())]
        self._files, self._stderr = {}, {}
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


def parse_crash(text: str) -> CrashTrace:
    """The last fatal error in what ``faulthandler`` has written; tracebacks that were asked for stand before it."""
    _, mark, last = text.rpartition(_SAID)
    if not mark:
        return CrashTrace("", ())
    said, _, threads = last.partition("\n")
    main, others = _stacks_of(_AFTERWARDS.split(threads)[0])
    return CrashTrace(_SIGNALS.get(said.strip(), said.strip()[:40]), main, thread_stack=calling(others))


def _stacks_of(threads: str) -> tuple[tuple[Frame, ...], list[tuple[Frame, ...]]]:
    """Outermost frame first; the main thread's, which is the last whichever the signal has struck, and the others."""
    main, *others = parse_threads(threads.replace("Current thread", "Thread"))
    return main, others
