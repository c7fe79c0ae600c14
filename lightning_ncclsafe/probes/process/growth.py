"""How fast processes of this host grow, and why one does not answer, from two looks some time apart."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_ncclsafe.facts import ANSWERING, ProcessFacts
from lightning_ncclsafe.probes.absent import grown
from lightning_ncclsafe.probes.process.main_thread import ThreadLook

LEAST_S = 0.5
"""Least seconds between two looks: a starting process allocates in bursts."""

# The best span: shorter ones show single bursts, longer ones older history.
_SPAN_S = 2.0
# An older look shows too little about the present.
_OLDEST_S = 60.0
_LOOKS = 8
_PROCESSES = 256


@dataclass(frozen=True, slots=True)
class MemoryLook:
    """One reading of a process's memory."""

    at_s: float
    rss_bytes: int
    swap_bytes: int | None


class MemoryGrowth:
    """Remembers the last looks at some processes. May be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._looks: dict[int, deque[MemoryLook]] = {}

    def measure(self, pid: int, rss_bytes: int | None, swap_bytes: int | None) -> tuple[int | None, int | None]:
        """Records a look at a process.

        Args:
            rss_bytes: Its resident memory; None if unknown.

        Returns:
            Growth of its resident and swapped memory, bytes per second, since an earlier look: the last one that is at
            least 2 s old, or else the first one; None if none is 0.5 s old.
        """
        if rss_bytes is None:
            return None, None
        now = MemoryLook(self._clock(), rss_bytes, swap_bytes)
        with self._lock:
            looks = self._looks.setdefault(pid, deque(maxlen=_LOOKS))
            before = _earlier(looks, now.at_s)
            if not looks or now.at_s - looks[-1].at_s >= LEAST_S:
                looks.append(now)
            if len(self._looks) > _PROCESSES:
                del self._looks[next(iter(self._looks))]
        return growth_between(before, now)


def _earlier(looks: deque[MemoryLook], now_s: float) -> MemoryLook | None:
    recent = [look for look in looks if LEAST_S <= now_s - look.at_s <= _OLDEST_S]
    spanning = [look for look in recent if now_s - look.at_s >= _SPAN_S]
    return spanning[-1] if spanning else next(iter(recent), None)


def growth_between(before: MemoryLook | None, now: MemoryLook) -> tuple[int | None, int | None]:
    """Growth of resident and swapped memory, bytes per second; None if unknown."""
    span_s = now.at_s - before.at_s if before is not None else 0.0
    if before is None or span_s <= 0:
        return None, None
    swapped = grown(now.swap_bytes, before.swap_bytes)
    swaps = None if swapped is None else round(swapped / span_s)
    return round((now.rss_bytes - before.rss_bytes) / span_s), swaps


def needs_second_look(seen: ProcessFacts) -> bool:
    """Whether a second look is needed to see why a process does not answer."""
    return seen.memory_growth_bytes_per_s is None or (seen.state in ANSWERING and bool(seen.stack))


def with_core_shares(facts: ProcessFacts, before: ThreadLook, now: ThreadLook, span_s: float) -> ProcessFacts:
    """Adds the share of the time for which its main thread ran, and for which it waited for a core, between two looks.

    Args:
        span_s: Seconds between them; if they are too few, nothing is added.
    """
    if span_s < LEAST_S:
        return facts
    ran, queued = _share(before.ran_s, now.ran_s, span_s), _share(before.queued_s, now.queued_s, span_s)
    return replace(facts, ran_share=ran, queued_share=queued)


def _share(before: float | None, now: float | None, span_s: float) -> float | None:
    return None if before is None or now is None else round(min(max((now - before) / span_s, 0.0), 1.0), 3)
