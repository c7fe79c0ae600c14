"""The settings that may be tried next, and why."""

from dataclasses import dataclass
from typing import Literal

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.choice import HEADROOM, Bound, Choice, choose, fitting, scarcest, setting
from lightning_ncclsafe.loaders.tuning.expected import (
    MOST_PREFETCH,
    USUAL_PREFETCH,
    covering,
    most_prefetch,
    workers_by_cores,
    workers_needed,
)
from lightning_ncclsafe.loaders.tuning.measures import Measures
from lightning_ncclsafe.loaders.tuning.trends import busy_cores
from lightning_ncclsafe.report.times import share_words, time_words

Kind = Literal["workers", "prefetch", "fewer", "held"]

# How much faster than the step fewer workers have to be, on average, to be tried while nothing is wrong.
_AMPLE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A setting to be tried.

    Attributes:
        kind: What it changes: more workers, more batches ahead, fewer workers because fewer do, or fewer because the
            quota holds them.
        before: The setting in force.
        choice: The setting.
        measures: What was measured with the setting in force.
        reason: Why, in words.
    """

    kind: Kind
    before: Choice
    choice: Choice
    measures: Measures
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a loader may use.

    Attributes:
        budget: What there is.
        copies: How often a batch that is ready is held in memory.
    """

    budget: Budget
    copies: int = 1

    def choose(self, measures: Measures) -> Choice:
        """See :func:`choose`."""
        return choose(measures, self.budget, copies=self.copies)

    def most_prefetch(self, workers: int, measures: Measures) -> int:
        """See :func:`most_prefetch`."""
        return most_prefetch(workers, measures, self.budget, copies=self.copies)

    def admits(self, choice: Choice, measures: Measures) -> bool:
        """Whether there is room for a setting."""
        if choice.workers == 0:
            return True
        return (
            choice.workers <= self.budget.workers
            and self.most_prefetch(choice.workers, measures) >= choice.prefetch > 0
        )

    def shrunk(self, choice: Choice, measures: Measures) -> Choice:
        """The part of a setting that there is room for."""
        most = min(choice.workers, self.budget.workers)
        workers, prefetch = fitting(most, lambda _: choice.prefetch, measures, self.budget, copies=self.copies)
        has_room = (workers, prefetch) == (most, choice.prefetch) or most == 0
        bound = "cores" if has_room else scarcest(measures, self.budget, copies=self.copies)
        return setting(workers, prefetch, measures, self.budget, bound)


def raises(choice: Choice, measures: Measures, limits: Limits) -> list[Move]:
    """What may help a loader that is not ahead of the step, the likelier first."""
    workers, prefetch = _more_workers(choice, measures, limits), _more_prefetch(choice, measures, limits)
    is_slow = workers_needed(measures, HEADROOM) > choice.workers
    return [move for move in ((workers, prefetch) if is_slow else (prefetch, workers)) if move is not None]


def _more_workers(choice: Choice, measures: Measures, limits: Limits) -> Move | None:
    wanted = limits.choose(measures)
    target = max(choice.workers + 1, choice.workers * 3 // 2)
    if wanted.workers > choice.workers:
        target = wanted.workers
    workers = min(target, limits.budget.workers)
    most = limits.most_prefetch(workers, measures) if workers else 0
    if workers <= choice.workers or most < min(choice.prefetch or USUAL_PREFETCH, USUAL_PREFETCH):
        return None
    prefetch = min(most, max(choice.prefetch, covering(workers, measures)))
    why = f"{_number(choice.workers)} not enough: {_late(measures)}"
    return _move("workers", choice, (workers, prefetch), measures, limits, why)


def _more_prefetch(choice: Choice, measures: Measures, limits: Limits) -> Move | None:
    if choice.workers == 0:
        return None
    most = min(MOST_PREFETCH, limits.most_prefetch(choice.workers, measures))
    prefetch = min(most, max(2 * choice.prefetch, covering(choice.workers, measures)))
    if prefetch <= choice.prefetch:
        return None
    why = f"prefetch_factor={choice.prefetch} was not enough: {_late(measures)}"
    return _move("prefetch", choice, (choice.workers, prefetch), measures, limits, why)


def fewer(choice: Choice, measures: Measures, limits: Limits) -> list[Move]:
    """What may do as well where nothing is waited for."""
    wanted = limits.choose(measures)
    workers = max(1, workers_needed(measures, _AMPLE)) if wanted.workers else 0
    if workers >= choice.workers:
        return []
    room = limits.most_prefetch(workers, measures) if workers else 0
    prefetch = min(room, max(choice.prefetch, covering(workers, measures))) if workers else 0
    why = f"{workers} of {choice.workers} workers would do: {times(measures)}"
    return [_move("fewer", choice, (workers, prefetch), measures, limits, why)] if prefetch or not workers else []


def times(measures: Measures) -> str:
    """How long batches and steps take, in words."""
    return f"a batch takes a worker {time_words(measures.service_s)}, a step {time_words(measures.gap_s)}"


def fewer_by_cores(choice: Choice, measures: Measures, limits: Limits) -> Move | None:
    """Fewer workers where they and the process itself keep more cores busy than there are for them."""
    workers = min(choice.workers - 1, workers_by_cores(measures, limits.budget))
    why = (
        f"{_number(choice.workers)} too many: with the process itself they kept {busy_cores(measures):.1f} of "
        f"{limits.budget.cores:.4g} cores busy"
    )
    return _move("held", choice, (workers, choice.prefetch), measures, limits, why) if workers >= 1 else None


def fewer_by_quota(choice: Choice, measures: Measures, limits: Limits) -> Move | None:
    """Fewer workers where the control group's quota holds them."""
    workers = min(choice.workers - 1, choice.workers * 2 // 3)
    why = (
        f"{_number(choice.workers)} too many: the quota held the rank's processes "
        f"{share_words(measures.throttled)} of the time"
    )
    return _move("held", choice, (workers, choice.prefetch), measures, limits, why) if workers >= 1 else None


def _move(kind: Kind, before: Choice, pair: tuple[int, int], measures: Measures, limits: Limits, reason: str) -> Move:
    bound: Bound = "cores" if kind == "held" else limits.choose(measures).bound
    choice = setting(*pair, measures, limits.budget, bound)
    return Move(kind=kind, before=before, choice=choice, measures=measures, reason=reason)


def _number(workers: int) -> str:
    return "1 worker was" if workers == 1 else f"{workers} workers were" if workers else "loading without workers was"


def _late(measures: Measures) -> str:
    return f"{share_words(measures.starved)} of the batches were not ready"
