"""What a main thread reads from or writes to, and the program at the other end if that is a pipe.

Links in procfs are read, but no file is opened or asked about, as its storage may not answer.
"""

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

import psutil

from lightning_ncclsafe.probes.absent import line_after, or_none
from lightning_ncclsafe.probes.process.main_thread import system_call

_PROC = Path("/proc")
_MODES = {"read": os.O_RDONLY, "write": os.O_WRONLY}
_MOST_PROCESSES, _MOST_FILES = 64, 1024


def awaited_file(of: int | None = None) -> str:
    """What the main thread reads from or writes to: ``"/data/train.bin"``, ``"pipe:[4711]"``; empty if unknown.

    Args:
        of: Process id of another process; None for this one.
    """
    return _file_and_mode(of)[0]


def program_at_other_end(of: int | None = None) -> int:
    """The descendant at the other end of the pipe that the main thread is in; 0 if there is none, or several may be.

    A process that has both ends has inherited them, as workers do that were forked later.

    Args:
        of: Process id of another process; None for this one.
    """
    pipe, own = _file_and_mode(of)
    if not pipe.startswith("pipe:"):
        return 0
    other = os.O_WRONLY if own == os.O_RDONLY else os.O_RDONLY
    holders = {}
    for process in (or_none(lambda: psutil.Process(of).children(recursive=True)) or [])[:_MOST_PROCESSES]:
        if _modes_of(process.pid, pipe) == {other}:
            holders[process.pid] = or_none(process.ppid) or 0
    # A program hands its end on to what it starts.
    first = [pid for pid, parent in holders.items() if parent not in holders]
    return first[0] if len(first) == 1 else 0


def _file_and_mode(of: int | None) -> tuple[str, int]:
    """The file that the main thread is in, and ``O_RDONLY`` if it reads from it, ``O_WRONLY`` if it writes to it."""
    call, arguments = system_call(of)
    if call not in _MODES or not arguments:
        return "", -1
    link = or_none(lambda: os.readlink(_PROC / str(of or os.getpid()) / "fd" / str(arguments[0]))) or ""
    return link, _MODES[call]


def _modes_of(pid: int, pipe: str) -> set[int]:
    """How a process has a pipe open: ``O_RDONLY``, ``O_WRONLY``."""
    folder = _PROC / str(pid)
    modes = set()
    for place in or_none(lambda: [*islice((folder / "fd").iterdir(), _MOST_FILES)]) or ():
        with suppress(OSError, ValueError):
            if os.readlink(place) == pipe:
                modes.add(int(line_after(folder / "fdinfo" / place.name, "flags:"), 8) & os.O_ACCMODE)
    return modes
