"""What the ranks of this host write when a fatal signal ends them: SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL.

``faulthandler`` writes it from its C signal handler into the file in memory that each rank has for its traceback. Who
has opened that file before can read it when its process is gone; when nobody holds it any more, it is gone, too.

Why a process has aborted itself, the C++ library says on stderr. Where that is a file, as under a scheduler, it is
held, too, and what has been added to it is looked at.
"""

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process import traceback_signal
from lightning_ncclsafe.probes.process.stacks import calling

ENDED = ("gone", "zombie")
"""States of a process that has ended, as :class:`~lightning_ncclsafe.facts.ProcessFacts` has them."""

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
# The end of a file is enough: a process that aborts says nothing afterwards, its peers a traceback or two.
_TAIL_BYTES = 1 << 17
_MOST_SAID = 300
# Of an exception that nobody has caught, of the C library's own checks, and of its assertions.
_WHY = re.compile(
    r"^\s*what\(\):\s*(.+)$|^(.*: Assertion .+ failed\.)$|^((?:malloc|free|realloc)\w*\(\): .+)$", re.MULTILINE
)
_AFTERWARDS = re.compile(r"\n\n(?:Extension modules|Current thread's C stack)")


class LastWord(NamedTuple):
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


class LastWords:
    """Holds the files of the other ranks of this host."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._stderr: dict[int, tuple[int, int]] = {}

    def hold(self, processes: Iterable[tuple[int, int]]) -> None:
        """Opens the files of processes, by process id and by file descriptor in that process; -1 where it has none."""
        for pid, fd in processes:
            if fd >= 0 and pid not in self._files:
                with suppress(OSError):
                    self._files[pid] = _open(pid, fd)
                with suppress(OSError):
                    self._hold_stderr(pid)

    def _hold_stderr(self, pid: int) -> None:
        # A pipe or a terminal would be opened anew, and what is read of it would be lost to whoever reads it.
        if stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{_STDERR}").st_mode):
            file = _open(pid, _STDERR)
            self._stderr[pid] = file, os.fstat(file).st_size

    def of(self, pid: int) -> LastWord:
        """What a process that is gone has written last."""
        found = LastWord("", ())
        with suppress(OSError, KeyError):
            found = parse(_text(self._files[pid], 0, _MOST_BYTES))
        if found.signal in ("", "SIGABRT"):
            with suppress(OSError, KeyError):
                file, began = self._stderr[pid]
                return found._replace(
                    said=why(_text(file, max(began, os.fstat(file).st_size - _TAIL_BYTES), _TAIL_BYTES))
                )
        return found

    def close(self) -> None:
        """Gives the files back."""
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
    """Why a process has aborted itself, by the last line of its stderr that says so; empty if none does."""
    told = [next(filter(None, found.groups())) for found in _WHY.finditer(text)]
    return told[-1].strip()[:_MOST_SAID] if told else ""


def parse(text: str) -> LastWord:
    """The last fatal error in what ``faulthandler`` has written; tracebacks that were asked for stand before it."""
    _, mark, last = text.rpartition(_SAID)
    if not mark:
        return LastWord("", ())
    said, _, threads = last.partition("\n")
    main, others = _stacks_of(_AFTERWARDS.split(threads)[0])
    return LastWord(_SIGNALS.get(said.strip(), said.strip()[:40]), main, thread_stack=calling(others))


def _stacks_of(threads: str) -> tuple[tuple[Frame, ...], list[tuple[Frame, ...]]]:
    """Outermost frame first; the main thread's, which is the last whichever the signal has struck, and the others."""
    main, *others = traceback_signal.parse_threads(threads.replace("Current thread", "Thread"))
    return main, others
