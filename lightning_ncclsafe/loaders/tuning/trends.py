"""Which measures call for another setting, and which tell that it was for the better."""

from dataclasses import replace

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.expected import CORE_TOLERANCE
from lightning_ncclsafe.loaders.tuning.measures import Measures

# Below, one batch of a window of 40 was late, and what it was waited for is less than a step's own jitter.
_STARVED = 0.02
_WAIT_SHARE = 0.01
# Less is within what two windows with the same setting differ by.
_GAIN = 0.05
# From here on the quota, not chance, holds the processes.
_THROTTLED = 0.02
# How far what is measured has to move before what was tried is worth trying again.
_CHANGE = 1.25
# Of a window in the running mean, whose first ten windows are what it is compared with: where batches vary by as much
# as they take, means of 20 differ by a quarter often, and those of ten such windows hardly ever.
_RECENT_WEIGHT = 0.1


def rate(measures: Measures) -> float:
    """Batches a second."""
    return measures.batches / measures.wall_s if measures.wall_s > 0 else 0.0


def starves(measures: Measures) -> bool:
    """Whether the ready queue was found empty, and the wait matters."""
    return measures.starved > _STARVED and measures.wait_s > _WAIT_SHARE * measures.gap_s


def gained(before: Measures, now: Measures) -> bool:
    """Whether a change was worth it: in throughput or, where steps vary as well, in waiting."""
    less_wait_s = before.wait_s - now.wait_s
    return rate(now) >= (1 + _GAIN) * rate(before) or less_wait_s >= _GAIN * (before.gap_s + before.wait_s) > 0


def lost(before: Measures, now: Measures) -> bool:
    """Whether a change has cost throughput."""
    return rate(now) < (1 - _GAIN) * rate(before)


def is_throttled(measures: Measures) -> bool:
    """Whether the control group's quota holds the rank's processes."""
    return measures.throttled > _THROTTLED


def busy_cores(measures: Measures) -> float:
    """Cores that the process and its workers keep busy; workers that wait for room in the queue do not."""
    if measures.workers == 0:
        return measures.own_cores
    loading = min(float(measures.workers), measures.service_s * rate(measures))
    return measures.own_cores + loading * measures.cpu_share


def overcommits(measures: Measures, budget: Budget) -> bool:
    """Whether more cores are kept busy than this rank's share of them."""
    return busy_cores(measures) > budget.cores * CORE_TOLERANCE


class Drift:
    """How what is measured moves while a setting stays.

    Attributes:
        windows: How many there were.
        recent: Their running mean.
    """

    def __init__(self) -> None:
        self.windows = 0
        self.recent: Measures | None = None
        self._reference: Measures | None = None

    def add(self, measures: Measures) -> Measures:
        """Takes a window; returns the running mean."""
        self.windows += 1
        if self.recent is None:
            self.recent = measures
        else:
            self.recent = _mixed(self.recent, measures, max(_RECENT_WEIGHT, 1 / self.windows))
        if self.windows <= 1 / _RECENT_WEIGHT:
            self._reference = self.recent
        return self.recent

    def has_changed(self) -> bool:
        """Whether steps, batches, or waiting take a quarter more or less than at first."""
        if self.recent is None or self._reference is None:
            return False
        pairs = zip(_times(self.recent), _times(self._reference), strict=True)
        return any(max(now, first) > _CHANGE * min(now, first) for now, first in pairs)


def _times(measures: Measures) -> tuple[float, float, float]:
    return measures.gap_s, measures.service_s, measures.gap_s + measures.wait_s


def _mixed(old: Measures, new: Measures, weight: float) -> Measures:
    def mixed(name: str) -> float:
        return float((1 - weight) * getattr(old, name) + weight * getattr(new, name))

    return replace(
        new,
        gap_s=mixed("gap_s"),
        wait_s=mixed("wait_s"),
        starved=mixed("starved"),
        service_s=mixed("service_s"),
        service_q97_s=mixed("service_q97_s"),
        cpu_share=mixed("cpu_share"),
        own_cores=mixed("own_cores"),
        batches=old.batches + new.batches,
        wall_s=old.wall_s + new.wall_s,
    )
