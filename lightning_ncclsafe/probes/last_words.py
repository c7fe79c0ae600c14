"""What the ranks of this host write when a fatal signal ends them: SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL.

``faulthandler`` writes it from its C signal handler into the file in memory that each rank has for its traceback. Who
has opened that file before can read it when its process is gone; when nobody holds it any more, it is gone, too.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes import traceback_signal

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
_AFTERWARDS = re.compile(r"\n\n(?:Extension modules|Current thread's C stack)")


class LastWord(NamedTuple):
    """The signal that has ended a process, ``"SIGABRT"``, empty where none is known; and where its main thread was."""

    signal: str
    stack: tuple[Frame, ...]


class LastWords:
    """Holds the files of the other ranks of this host."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def hold(self, processes: Iterable[tuple[int, int]]) -> None:
        """Opens the files of processes, by process id and by file descriptor in that process; -1 where it has none."""
        for pid, fd in processes:
            if fd >= 0 and pid not in self._files:
                with suppress(OSError):
                    self._files[pid] = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def of(self, pid: int) -> LastWord:
        """What a process that is gone has written last."""
        if pid not in self._files:
            return LastWord("", ())
        with suppress(OSError):
            return parse(os.pread(self._files[pid], _MOST_BYTES, 0).decode("utf-8", "replace"))
        return LastWord("", ())

    def close(self) -> None:
        """Gives the files back."""
        while self._files:
            with suppress(OSError):
                os.close(self._files.popitem()[1])


def parse(text: str) -> LastWord:
    """The last fatal error in what ``faulthandler`` has written; tracebacks that were asked for stand before it."""
    _, mark, last = text.rpartition(_SAID)
    if not mark:
        return LastWord("", ())
    said, _, threads = last.partition("\n")
    return LastWord(_SIGNALS.get(said.strip(), said.strip()[:40]), main_of(_AFTERWARDS.split(threads)[0]))


def main_of(threads: str) -> tuple[Frame, ...]:
    """The main thread's stack, outermost frame first: the last one, whichever thread the signal has struck."""
    return traceback_signal.parse(threads.replace("Current thread", "Thread"))
