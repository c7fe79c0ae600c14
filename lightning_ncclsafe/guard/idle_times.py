"""How long a rank usually makes no progress, learned from this run, and from when on that is unusual."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from lightning_ncclsafe.facts.phase_kinds import LONG_S, PhaseKind

# Once a loop's batches are known: short beside what people wait before they look, long beside a garbage collection,
# a slow file or a busy host.
FLOOR_S = 10.0
# Where nothing is known yet, and in hooks that are called once an epoch or once a run: those differ for good reasons.
UNKNOWN_S = 60.0
# How much longer than usual is unusual. Step times differ by less than two; a rank that has to wait for another's
# garbage collection, evaluation of one batch or retry of a download stays below.
MULTIPLE = 4.0
# Batches of a kind after which it is known how long they take.
_BATCHES_TO_KNOW = 5
# Shorter ones do not matter: a multiple of them is below the floor.
_LEAST_S = 1.0
# Kept of each kind of phase, 4 KB; with a step of two seconds that is a quarter of an hour.
_KEPT = 512
# The usual length is the third-longest of those: the 99.4th percentile once all are there, and from the first on
# nothing that happened once or twice.
_RANK = 3
# One incident may come in pieces. What is longer than usual counts once in a while only, so that one incident stays
# one, while what comes again and again becomes usual.
_UNUSUAL_EVERY_S = 60.0


@dataclass
class _Kind:
    """What is known of one kind of phase; 28 kinds at most."""

    lengths_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    usual_s: float = 0.0
    batches: int = 0
    last_batch: int = -1
    unusual_at_s: float = float("-inf")

    def add(self, length_s: float) -> None:
        self.lengths_s.append(length_s)
        longest = heapq.nlargest(_RANK, self.lengths_s)
        self.usual_s = longest[-1] if len(longest) == _RANK else 0.0


class IdleTimes:
    """Learns how long one rank makes no progress in each kind of phase. Belongs to the watchdog's thread.

    It observes every tick of the watchdog and sees what is shorter than a tick by chance only; nothing that short
    matters here.
    """

    def __init__(self) -> None:
        self._kinds: dict[PhaseKind, _Kind] = {}
        self._before: tuple[float, PhaseKind] | None = None

    def observe(self, idle_s: float, phase_kind: PhaseKind, *, batch_idx: int, now_s: float) -> None:
        """A tick of the watchdog.

        Args:
            idle_s: Seconds since the rank last made progress.
            phase_kind: What it is in.
            batch_idx: Index of the batch being worked on.
            now_s: Seconds that only grow.
        """
        before, self._before = self._before, (idle_s, phase_kind)
        if before is not None and idle_s < before[0]:
            self._learn(*before, now_s)
        kind = self._kinds.setdefault(phase_kind, _Kind())
        if batch_idx != kind.last_batch:
            # Several may have passed since the last tick; fewer than none where a loop has begun again.
            kind.batches += max(batch_idx - kind.last_batch, 1) if kind.last_batch >= 0 else 0
            kind.last_batch = batch_idx

    def unusual_after_s(self, phase_kind: PhaseKind) -> float:
        """From how many seconds on a standstill is unusual in such a phase."""
        kind = self._kinds.get(phase_kind, _Kind())
        return max(_least_s(phase_kind, is_known=kind.batches >= _BATCHES_TO_KNOW), MULTIPLE * kind.usual_s)

    def _learn(self, length_s: float, phase_kind: PhaseKind, now_s: float) -> None:
        if length_s < _LEAST_S:
            return
        kind = self._kinds[phase_kind]
        if length_s >= self.unusual_after_s(phase_kind):
            if now_s - kind.unusual_at_s < _UNUSUAL_EVERY_S:
                return
            kind.unusual_at_s = now_s
        kind.add(length_s)


def _least_s(phase_kind: PhaseKind, *, is_known: bool) -> float:
    if phase_kind.per_batch and not phase_kind.is_long:
        return FLOOR_S if is_known else (LONG_S if phase_kind.evaluates else UNKNOWN_S)
    return UNKNOWN_S
