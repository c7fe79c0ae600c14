"""Python stacks of processes that cannot answer, by a signal whose handler works while the GIL is held.

``faulthandler`` writes a traceback from a C signal handler, without the GIL. Each rank arms one real-time signal with
a file in memory; a peer on the same host that finds it silent sends the signal and reads the file through
``/proc/PID/fd``. Forked loader workers inherit both, so a rank can ask its own workers for their stacks.

A rank that has not reached its Trainer yet cannot send its peers the number of that signal. The import of the package
arms it, and the name of the file, which peers find among the rank's open files, contains the number.

``faulthandler`` also writes to that file when a fatal signal ends the process, and ``sys.excepthook`` does with an
uncaught exception: see ``crash_traces``.

There is no guard between two calls of the Trainer either, so an armed rank stays armed.
"""

import faulthandler
import os
import re
import signal
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from lightning_ncclsafe.facts import COLLECTOR, Frame, codec
from lightning_ncclsafe.probes.process.stacks import exception_facts, seen_frame

# What faulthandler writes above the frames of a thread that collects garbage.
_COLLECTS = "  Garbage-collecting"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_ANSWER_S = 0.15
_NAME = "ncclsafe-traceback-"
_LINK = re.compile(rf"^/memfd:{_NAME}(\d+) ")
# Environment variables of launchers: the number of the rank, and the number of ranks.
_LAUNCHED = (("LOCAL_RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))

RAISED = "Uncaught exception: "
"""In the file, precedes an uncaught exception as JSON."""


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
    """Arms the signal in this process; :meth:`close` restores the state before."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._signum = 0
        self._pid = 0
        self._is_of_rank = False
        self._hook_before = sys.excepthook

    def arm(self) -> Armed | None:
        """Arms the first unused real-time signal, or re-arms the same one; None where the platform has none."""
        if self._file is not None and not _handles(os.getpid(), self._signum):
            # Lightning restores all signals through Python, which does not know of faulthandler's handler.
            faulthandler.unregister(self._signum)
            faulthandler.register(self._signum, file=self._file, all_threads=True)
        for signum in () if self._file is not None else _free_signals():
            self._file, self._signum, self._pid = _open_file(signum), signum, os.getpid()
            # Read now: Lightning removes these variables when its Trainer ends.
            self._is_of_rank = _is_launched(os.environ)
            faulthandler.register(signum, file=self._file, all_threads=True)
            # Crashes go to the same file, unless the user has sent them elsewhere; see CrashTraces.
            if not faulthandler.is_enabled() or _writes_for_parent():
                _enable_for_crashes(self._file)
            self._hook_before, sys.excepthook = sys.excepthook, self._uncaught
            break
        return None if self._file is None else Armed(signum=self._signum, fd=self._file.fileno())

    def close(self) -> None:
        """Restores the signal and closes the file."""
        if self._file is not None:
            faulthandler.unregister(self._signum)
            if self._file is _file_of_crashes():
                faulthandler.disable()
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


class _CrashFile:
    """The file for fatal signals. Only ``faulthandler`` refers to it, so it exists for as long as that writes to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def fileno(self) -> int:
        return self.file.fileno()


_crash_file: "weakref.ref[_CrashFile] | None" = None
# In a child, the file of its parent.
_parents_file: "weakref.ref[_CrashFile] | None" = None


def _enable_for_crashes(file: IO[bytes]) -> None:
    global _crash_file
    crash_file = _CrashFile(file)
    faulthandler.enable(file=crash_file, all_threads=True)
    _crash_file = weakref.ref(crash_file)


def _file_of_crashes() -> IO[bytes] | None:
    """The file that a crash is written to; None if the user has called ``faulthandler.enable`` or ``disable`` since."""
    crash_file = _crash_file() if _crash_file is not None else None
    return crash_file.file if crash_file is not None else None


def writes_crashes() -> bool:
    """Whether a crash of this process is written to its file."""
    return _file_of_crashes() is not None


def write_crashes_to(file: int) -> None:
    """In a forked child: a crash is written to a file of its parent's, until this process arms its own.

    Args:
        file: Its descriptor, which stays open.
    """
    global _parents_file
    if faulthandler.is_enabled():
        return  # by the user
    crash_file = _CrashFile(os.fdopen(file, "wb", buffering=0, closefd=False))
    faulthandler.enable(file=crash_file, all_threads=True)
    _parents_file = weakref.ref(crash_file)


def cease_crashes() -> None:
    """Reverses :func:`write_crashes_to`, unless the user has called ``faulthandler.enable`` since."""
    if _writes_for_parent():
        faulthandler.disable()


def _writes_for_parent() -> bool:
    return _parents_file is not None and _parents_file() is not None


def _forget_crashes() -> None:
    """In a fork: its crash would be taken for one of its parent."""
    if _file_of_crashes() is not None or _writes_for_parent():
        faulthandler.disable()


os.register_at_fork(after_in_child=_forget_crashes)

_early = TracebackSignal()


def arm_early(environ: Mapping[str, str] = os.environ) -> None:
    """Arms the signal if a launcher started this process as one of several ranks; never raises.

    Args:
        environ: The environment variables.
    """
    if _is_launched(environ):
        with suppress(Exception):
            _early.arm()


def take_early() -> TracebackSignal:
    """The signal of this process, for its guard to arm and close: the one armed at import, if there is one."""
    global _early
    taken, _early = _early, TracebackSignal()
    return TracebackSignal() if taken.is_inherited else taken


def leave(signal_: TracebackSignal) -> None:
    """Called when a guard ends. The signal of one of several ranks stays armed for the next guard."""
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


def _open_file(signum: int) -> IO[bytes]:
    """A new file, in memory if the system can: a signal handler must not wait for storage."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return os.fdopen(os.memfd_create(f"{_NAME}{signum}"), "wb", buffering=0)
    return tempfile.TemporaryFile(prefix="ncclsafe-")


def armed_in(pid: int) -> Armed | None:
    """Where another process of this user on this host writes its traceback, by its open files; None if nowhere."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                found = _LINK.match(os.readlink(f"/proc/{pid}/fd/{name}"))
                # It may have those of its peers open to read.
                if found and os.lstat(f"/proc/{pid}/fd/{name}").st_mode & stat.S_IWUSR:
                    return Armed(signum=int(found[1]), fd=int(name))
    return None


def ask(pid: int, armed: Armed, *, owner: int | None = None) -> tuple[Frame, ...]:
    """The main thread's stack of another process of this user on this host, outermost frame first; see ask_threads."""
    threads = ask_threads(pid, armed, owner=owner)
    return threads[0] if threads else ()


def ask_threads(pid: int, armed: Armed, *, owner: int | None = None) -> list[tuple[Frame, ...]]:
    """The stacks of all Python threads of another process of this user on this host, outermost frame first.

    Args:
        pid: The process to ask.
        armed: Where it writes.
        owner: The process whose file descriptor ``armed.fd`` is, if not ``pid`` itself: a worker writes to the file
            of the rank that forked it.

    Returns:
        The stacks, that of the main thread first, or nothing where the process does not handle the signal (it would
        die of it) or does not answer within 0.15 s.
    """
    path = Path(f"/proc/{owner or pid}/fd/{armed.fd}")
    try:
        if not _handles(pid, armed.signum):
            return []
        before = path.stat().st_size
        os.kill(pid, armed.signum)
        return parse_threads(_read_answer(path, before))
    except OSError:
        return []


def parse_threads(text: str) -> list[tuple[Frame, ...]]:
    """The threads' stacks in faulthandler's text, outermost frame first; the main thread's stack is first.

    The thread that handles the signal is called "Current thread"; without one, the main thread comes last. Garbage
    collection appears as a frame of its own, the innermost.
    """
    threads: list[list[Frame]] = []
    current = -1
    for line in text.splitlines():
        if "(most recent call first)" in line:
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


def _read_answer(path: Path, before: int) -> str:
    """Waits until the file has grown and stopped growing; its size is all that can be watched across processes."""
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
    """Whether a process has a handler for a signal: without one, the signal would kill it."""
    return bool(_caught(pid) >> (signum - 1) & 1)


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
