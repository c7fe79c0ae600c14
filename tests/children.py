"""The children of a process, without a look at all processes of the machine, which psutil takes."""

from contextlib import suppress
from pathlib import Path

import psutil


def pids_of_children(pid: int) -> set[int]:
    """Those that have ended and were not waited for included."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def living(pids: set[int]) -> list[psutil.Process]:
    """Those that have not ended."""
    found = []
    for pid in sorted(pids):
        with suppress(psutil.NoSuchProcess):
            if (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
