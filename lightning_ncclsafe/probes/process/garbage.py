"""Python's garbage collector: how it delays this process, and whether another one is in it at this moment.

The collector holds the GIL, so the guard of a rank that is in it cannot answer; and ``faulthandler`` only mentions it
where it writes the stacks of all threads. So each rank has a byte in memory that its peers can read.
"""

import gc
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_ncclsafe.facts import GarbageFacts
from lightning_ncclsafe.probes.process.open_files import files_in_memory

# Collections of younger generations take microseconds, and run many times a second.
_OLDEST_GENERATION = 2
_REMEMBERED_S = 60.0
_KEPT = 256
_COLLECTS, _RESTS = b"1", b"0"
# Python closes the descriptor of a mapping that is deleted.
_never_closed: list[mmap.mmap] = []


class GarbageWatch:
    """Records when full garbage collections of this process begin and end; costs about a microsecond for each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pid = 0
        self._shared: mmap.mmap | None = None
        self._began_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def start(self) -> None:
        """Registers the callback."""
        self._pid = os.getpid()
        with suppress(OSError, AttributeError):  # the system has no files in memory
            file = os.memfd_create(_name(self._pid))
            try:
                os.ftruncate(file, len(_COLLECTS))
                self._shared = mmap.mmap(file, len(_COLLECTS))
            finally:
                os.close(file)  # the mapping has a descriptor of its own
        gc.callbacks.append(self._notice)

    def close(self) -> None:
        """Removes the callback; may be called more than once."""
        if self._notice in gc.callbacks:
            gc.callbacks.remove(self._notice)
        shared, self._shared = self._shared, None
        if shared is not None:
            if _shared_by(os.getpid()):
                shared.close()
            else:  # the program has closed all descriptors, and another file may have the number of this one
                _never_closed.append(shared)

    def read(self) -> GarbageFacts:
        """The recent collections; takes about 1 ms for each gigabyte of small objects."""
        now_s, began_s = self._clock(), self._began_s
        recent = [(start, end) for start, end in [*self._pauses] if now_s - end <= _REMEMBERED_S]
        longest = max(recent, key=lambda pause: pause[1] - pause[0], default=(now_s, now_s))
        return GarbageFacts(
            running_s=round(now_s - began_s, 3) if began_s is not None else 0.0,
            longest_s=round(longest[1] - longest[0], 3),
            ended_ago_s=round(now_s - longest[1], 3),
            total_s=round(sum(end - start for start, end in recent), 3),
            count=len(recent),
            blocks=sys.getallocatedblocks(),
        )

    def _notice(self, phase: str, info: dict[str, Any]) -> None:
        """Called by the garbage collector, on any thread."""
        if info["generation"] < _OLDEST_GENERATION:
            return
        if phase == "start":
            self._began_s = self._clock()
            self._share(_COLLECTS)
        elif self._began_s is not None:
            self._pauses.append((self._began_s, self._clock()))
            self._began_s = None
            self._share(_RESTS)

    def _share(self, state: bytes) -> None:
        shared = self._shared
        # A fork has the memory and the callback of its parent.
        if shared is not None and os.getpid() == self._pid:
            with suppress(ValueError):  # closed meanwhile, by another thread
                shared[:] = state


def collects_garbage(pid: int) -> bool:
    """Whether another process of this user on this host is in a full collection; False where that is unknown."""
    link = _shared_by(pid)
    with suppress(OSError):
        return link is not None and link.read_bytes() == _COLLECTS
    return False


def _shared_by(pid: int) -> Path | None:
    """The descriptor of what a process shares, in ``/proc``; None if it shares nothing."""
    return next((link for link, name in files_in_memory(pid) if name == _name(pid)), None)


def _name(pid: int) -> str:
    return f"ncclsafe-garbage-{pid}"
