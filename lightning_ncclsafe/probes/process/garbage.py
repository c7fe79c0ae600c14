"""How long Python's garbage collector holds this process up: whole collections, timed by ``gc.callbacks``."""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_ncclsafe.facts import GarbageFacts

# Collections of the younger generations take microseconds, and come many times a second.
_OLDEST_GENERATION = 2
_REMEMBERED_S = 60.0
_KEPT = 256


class GarbageWatch:
    """Notes when whole collections begin and end; costs about a microsecond for each, and nothing in between.

    Args:
        clock: Seconds that only grow; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def start(self) -> None:
        """Begins to listen."""
        gc.callbacks.append(self._notice)

    def close(self) -> None:
        """Stops listening; may be called more than once."""
        if self._notice in gc.callbacks:
            gc.callbacks.remove(self._notice)

    def read(self) -> GarbageFacts:
        """What the collector took; takes about 1 ms for each gigabyte of small objects."""
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
        """Called by the collector itself, on whichever thread it has struck."""
        if info["generation"] < _OLDEST_GENERATION:
            return
        if phase == "start":
            self._began_s = self._clock()
        elif self._began_s is not None:
            self._pauses.append((self._began_s, self._clock()))
            self._began_s = None
