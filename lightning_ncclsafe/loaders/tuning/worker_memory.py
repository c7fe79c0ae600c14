"""How much memory the workers of a loader have for themselves."""

import os
import time
from contextlib import suppress

import psutil

# Reading a process's memory map holds a lock of that process for milliseconds, and where it has much memory for longer:
# it takes at most this share of a core.
_LEAST_EVERY_S, _MOST_SHARE = 1.0, 0.005


class WorkerMemory:
    """Reads the memory of a loader's workers, now and then; from one thread, while another one changes the workers."""

    def __init__(self) -> None:
        self._pids: tuple[int, ...] = ()
        self._read_pids: tuple[int, ...] = ()
        self._due_at = 0.0
        self._largest_bytes = 0

    def watch(self, pids: tuple[int, ...]) -> None:
        """These are the workers now."""
        self._pids = pids

    def read(self) -> int:
        """The most that a worker of those now was seen to have, bytes; 0 if none was seen."""
        now, pids = time.monotonic(), self._pids
        if pids != self._read_pids:
            self._read_pids, self._due_at, self._largest_bytes = pids, now, 0
        if now >= self._due_at:
            self._largest_bytes = max([self._largest_bytes, *map(_own_bytes, pids)])
            took_s = time.monotonic() - now
            self._due_at = now + max(_LEAST_EVERY_S, took_s / _MOST_SHARE)
        return self._largest_bytes


def _own_bytes(pid: int) -> int:
    """What would be free if the process ended: pages shared with this one are not counted."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        # A number that was given to another process meanwhile is no worker.
        if process.ppid() == os.getpid():
            return int(process.memory_full_info().uss)
    return 0
