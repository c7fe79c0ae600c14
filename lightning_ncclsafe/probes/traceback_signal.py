"""Python stacks of processes that cannot answer for themselves, by a signal that works while the GIL is held.

``faulthandler`` writes a traceback from a C signal handler, without the GIL. Each rank arms one real-time signal with
an unlinked temporary file; a peer on the same host that finds it silent sends the signal and reads the file through
``/proc/PID/fd``. Forked loader workers inherit both, so a rank can ask its own workers where they stand.
"""

import faulthandler
import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.stacks import is_user_code

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_ANSWER_S = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """Where a process writes its traceback when asked.

    Attributes:
        signum: The signal that asks.
        fd: File descriptor, in that process, of the file it writes to.
    """

    signum: int
    fd: int


class TracebackSignal:
    """Arms the signal in this process; :meth:`close` restores what was there."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._signum = 0

    def arm(self) -> Armed | None:
        """Arms the first real-time signal that nobody uses; None where the platform has none."""
        for signum in _free_signals():
            self._file = tempfile.TemporaryFile(prefix="ncclsafe-")  # noqa: SIM115 - lives as long as the guard
            self._signum = signum
            faulthandler.register(signum, file=self._file, all_threads=True)
            return Armed(signum=signum, fd=self._file.fileno())
        return None

    def close(self) -> None:
        """Restores the signal and closes the file."""
        if self._file is not None:
            faulthandler.unregister(self._signum)
            self._file.close()
            self._file = None


def ask(pid: int, armed: Armed, *, owner: int | None = None) -> tuple[Frame, ...]:
    """The main thread's stack of another process of this user on this host, outermost frame first.

    Args:
        pid: The process to ask.
        armed: Where it writes.
        owner: The process whose file descriptor ``armed.fd`` is, if not ``pid`` itself: a worker writes to the file
            of the rank that forked it.

    Returns:
        The stack, or nothing where the process does not handle the signal (it would die of it) or does not answer
        within 0.15 s.
    """
    path = Path(f"/proc/{owner or pid}/fd/{armed.fd}")
    try:
        if not _handles(pid, armed.signum):
            return ()
        before = path.stat().st_size
        os.kill(pid, armed.signum)
        return parse(_read_answer(path, before))
    except OSError:
        return ()


def parse(text: str) -> tuple[Frame, ...]:
    """The main thread's stack out of faulthandler's text, outermost frame first.

    The thread that handles the signal is called "Current thread"; without one, the main thread comes last.
    """
    threads: list[list[Frame]] = []
    current: list[Frame] | None = None
    for line in text.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
            if line.startswith("Current thread"):
                current = threads[-1]
        elif threads and (found := _FRAME.match(line)):
            file = found["file"]
            user = is_user_code(file)
            threads[-1].append(Frame(file=file, line=int(found["line"]), function=found["function"], user=user))
    chosen = current or (threads[-1] if threads else [])
    return tuple(reversed(chosen))


def _read_answer(path: Path, before: int) -> str:
    """Waits until the file has grown and rests; there is nothing to wait on across processes but its size."""
    deadline = time.monotonic() + _ANSWER_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.01)
        grown = path.stat().st_size
        if grown > before and grown == size:
            break
        size = grown
    with path.open("rb") as file:
        file.seek(before)
        return file.read(1 << 20).decode("utf-8", "replace")


def _handles(pid: int, signum: int) -> bool:
    """Whether a process catches a signal: one that does not would die of it."""
    return bool(_caught(pid) >> (signum - 1) & 1)


def _caught(pid: int) -> int:
    """The signals that a process catches, as bits (``SigCgt`` in ``/proc/PID/status``)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return int(line.split()[1], 16)
    return 0


def _free_signals() -> list[int]:
    """Real-time signals at their default action, the highest first: low ones are taken by runtimes that use any."""
    first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
    with suppress(ValueError, OSError):
        # Python does not know of handlers that are set below it, as faulthandler's and those of C libraries are.
        caught = _caught(os.getpid())
        at_default = [number for number in range(last - 1, first, -1) if signal.getsignal(number) is signal.SIG_DFL]
        return [number for number in at_default if not caught >> (number - 1) & 1]
    return []
