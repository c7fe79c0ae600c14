"""Finds which rank was late for a collective, by how much, and in which phase of its step it fell behind.

The rank for which the others wait does not wait itself: it calls last, and its collective takes the shortest time. The
shortest duration among the ranks is the *transfer*, the rest of each duration is *waiting*.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.matching import MatchedCalls, durations_known
from lightning_ncclsafe.timing.summary import STEP_PHASES, StepPhase
from lightning_ncclsafe.timing.windows import SPAN, Spans

# Less waiting than this does not matter; most collectives are so short.
_LEAST_NS = 100_000

# The phase in which one rank fell behind is found by comparison with at most this many others.
_COMPARED = 16
# A phase is named if it explains this share of the delay.
_EXPLAINS = 0.4
# In each block, the phase is determined only for this many late arrivals, the latest.
_MOST_EXPLAINED = 256
NO_PHASE = -1


class Intervals:
    """Intervals of each rank.

    Args:
        by_rank: Beginnings and ends, as arrays of nanoseconds; they may overlap.
    """

    def __init__(self, by_rank: Mapping[int, tuple[NDArray[Any], NDArray[Any]]]) -> None:
        self._timelines = {rank: _timeline(*intervals) for rank, intervals in by_rank.items() if len(intervals[0])}

    def within_ns(self, ranks: Iterable[int], begin_ns: NDArray[Any], end_ns: NDArray[Any]) -> NDArray[Any]:
        """How much of each rank's intervals is between two moments, shapes (R, K)."""
        found_ns = np.zeros_like(begin_ns)
        for row, rank in enumerate(ranks):
            if rank in self._timelines:
                moments_ns, until_ns = self._timelines[rank]
                origin_ns = moments_ns[0]
                between = [
                    np.interp(at_ns[row] - origin_ns, moments_ns - origin_ns, until_ns) for at_ns in (begin_ns, end_ns)
                ]
                found_ns[row] = between[1] - between[0]
        return found_ns


class Waits(Intervals):
    """The waits of each rank, in a few blocks of collectives.

    Args:
        blocks: Blocks of all groups, from about the same time. A rank that makes its next call in a group before the
            last one has come has not waited until then.
    """

    def __init__(self, blocks: Iterable[MatchedCalls]) -> None:
        begins: dict[int, list[NDArray[Any]]] = {}
        ends: dict[int, list[NDArray[Any]]] = {}
        for calls in blocks:
            released_ns = calls.arrival_ns.max(axis=0)
            for rank, arrival_ns in zip(calls.group.ranks, calls.arrival_ns, strict=True):
                end_ns = np.minimum(released_ns, np.append(arrival_ns[1:], np.iinfo(np.int64).max))
                waited = end_ns - arrival_ns >= _LEAST_NS
                begins.setdefault(rank, []).append(arrival_ns[waited])
                ends.setdefault(rank, []).append(end_ns[waited])
        super().__init__({rank: (np.concatenate(begins[rank]), np.concatenate(ends[rank])) for rank in begins})


def _timeline(begin_ns: NDArray[Any], end_ns: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Moments at which an interval begins or ends, and the length of all intervals up to then."""
    order = np.argsort(begin_ns, kind="stable")
    begin_ns, end_ns = begin_ns[order], np.maximum.accumulate(end_ns[order])
    # If two overlap, in groups that work at the same time, the second begins at the end of the first.
    begin_ns[1:] = np.maximum(begin_ns[1:], end_ns[:-1])
    moments_ns = np.column_stack([begin_ns, end_ns]).ravel()
    lasted_ns = np.column_stack([np.zeros_like(begin_ns), end_ns - begin_ns]).ravel()
    return moments_ns, np.cumsum(lasted_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Who was late in a block of matched calls: R ranks, K collectives, nanoseconds.

    Attributes:
        late_ns: How late each rank arrived against the median of the ranks, less how late it already was at the
            collective before; 0 where clocks are too inaccurate. Shape (R, K).
        wait_ns: How long each rank waited for the last one, shape (R, K).
        transfer_ns: Shortest duration among the ranks; -1 where durations are not known. Shape (K,).
        skew_ns: Between the first arrival and the last, shape (K,).
        phase: Number of the phase in which a rank fell behind; :data:`NO_PHASE` where it was not late, or where no
            phase explains it. Shape (R, K).
    """

    late_ns: NDArray[Any]
    wait_ns: NDArray[Any]
    transfer_ns: NDArray[Any]
    skew_ns: NDArray[Any]
    phase: NDArray[Any]


def lateness(
    calls: MatchedCalls,
    spans: Mapping[int, Spans],
    *,
    least_ns: float = 0.0,
    waits: Waits | None = None,
    own: Intervals | None = None,
) -> Lateness:
    """Determines who was late.

    Args:
        calls: A block of collectives of one group.
        spans: Phases of the group's ranks by rank, on the reference clock.
        least_ns: No phase is determined for arrivals that are less late than this.
        waits: When ranks waited in collectives of other groups; None where there are none.
        own: When code of this package kept ranks busy; None if it did not. This does not count as lateness.
    """
    timed = durations_known(calls.duration_ns)
    # All ranks are released at the same moment, so on the device the shortest duration is the latest arrival; this
    # needs no clocks. Without durations, the calls' own times are compared.
    # Relative to the first moment: a float cannot hold nanoseconds since the epoch.
    on_device = np.where(timed, -calls.duration_ns, _comparable(calls))
    skew_ns = on_device.max(axis=0) - on_device.min(axis=0)
    wait_ns = on_device.max(axis=0) - on_device
    began_ns = _own_work_began(calls)
    late_ns = np.maximum(on_device - _middle(on_device), 0)
    late_ns = np.where(timed, late_ns, np.minimum(late_ns, _fell_behind(calls, began_ns, waits)))
    if own is not None:
        # All of this package's work is subtracted, even if it ran concurrently with training: it may have held the GIL.
        since_ns = np.where(began_ns > 0, began_ns, calls.arrival_ns - late_ns.astype(np.int64))
        late_ns = np.maximum(late_ns - own.within_ns(calls.group.ranks, since_ns, calls.arrival_ns), 0)
    late_ns[:, ~timed] = _resolved(late_ns[:, ~timed], calls.uncertainty_ns)
    return Lateness(
        late_ns=late_ns,
        wait_ns=wait_ns,
        transfer_ns=np.where(timed, calls.duration_ns.min(axis=0), -1),
        skew_ns=skew_ns,
        phase=_phases(calls, late_ns, began_ns, spans, max(least_ns, 1.0)),
    )


def _comparable(calls: MatchedCalls) -> NDArray[Any]:
    """Arrivals; with an unknown clock, a rank is neither early nor late."""
    arrival_ns: NDArray[Any] = calls.arrival_ns - calls.arrival_ns.min()
    known = calls.uncertainty_ns >= 0
    if not known.all():
        arrival_ns[~known] = _middle(arrival_ns[known]).astype(np.int64) if known.any() else 0
    return arrival_ns


def _middle(values: NDArray[Any]) -> NDArray[Any]:
    """Median over ranks; of two ranks, the earlier one."""
    middle: NDArray[Any] = values.min(axis=0) if len(values) == 2 else np.median(values, axis=0)
    return middle


def _own_work_began(calls: MatchedCalls) -> NDArray[Any]:
    """When each rank could continue after the collective before, shape (R, K); 0 in columns that follow none.

    That is when it called that one or, if it waited for it, when the last rank had arrived. A rank that makes its
    next call before then has not waited.
    """
    now = calls.arrival_ns
    before = np.concatenate([calls.before_ns[:, None], now[:, :-1]], axis=1)
    released_ns = before.max(axis=0)
    began_ns = np.where(released_ns <= now, np.maximum(before, released_ns), before)
    began_ns[:, ~calls.follows] = 0
    return began_ns


def _fell_behind(calls: MatchedCalls, began_ns: NDArray[Any], waits: Waits | None) -> NDArray[Any]:
    """How much longer than the others each rank has worked since the collective before.

    A rank that is 20 ms late for one gradient bucket is also 20 ms late for the next if nobody waits in between; that
    is one delay, not two. Time that a rank waits in another group is not work, either.
    """
    work_ns = calls.arrival_ns - began_ns
    if waits is not None:
        work_ns = work_ns - waits.within_ns(calls.group.ranks, began_ns, calls.arrival_ns)
    behind_ns = np.maximum(work_ns - _middle(work_ns), 0)
    return np.where(began_ns > 0, behind_ns, np.iinfo(np.int64).max)


def _resolved(late_ns: NDArray[Any], uncertainty_ns: NDArray[Any]) -> NDArray[Any]:
    """Lateness without what errors of the clocks may explain; an unknown clock explains anything."""
    if (uncertainty_ns == 0).all():
        return late_ns
    known = uncertainty_ns >= 0
    doubt_ns = uncertainty_ns + (np.median(uncertainty_ns[known]) if known.any() else 0)
    return np.where(known[:, None] & (late_ns > doubt_ns[:, None]), late_ns, 0)


def _phases(
    calls: MatchedCalls,
    late_ns: NDArray[Any],
    began_ns: NDArray[Any],
    spans: Mapping[int, Spans],
    least_ns: float,
) -> NDArray[Any]:
    found = np.full(late_ns.shape, NO_PHASE, dtype=np.int64)
    rows, columns = np.nonzero((late_ns >= least_ns) & (late_ns == late_ns.max(axis=0)))
    latest = zip(rows.tolist(), columns.tolist(), strict=True)
    worst = sorted(latest, key=lambda at: -late_ns[at])[:_MOST_EXPLAINED]
    earliest_ns = int(began_ns[began_ns > 0].min()) if (began_ns > 0).any() else 0
    timelines: dict[int, _Timeline] = {}
    for row, column in worst:
        if began_ns[row, column]:
            others = [other for other in range(len(calls.group.ranks)) if other != row][:_COMPARED]
            for each in (row, *others):
                if each not in timelines:
                    known = spans.get(calls.group.ranks[each], np.zeros(0, SPAN))
                    first = int(np.searchsorted(known["begin_ns"], earliest_ns, side="right")) - 1
                    timelines[each] = _Timeline(known[max(first, 0) :])
            found[row, column] = _phase(calls, late_ns, began_ns, timelines, row, column, others)
    return found


def _phase(
    calls: MatchedCalls,
    late_ns: NDArray[Any],
    began_ns: NDArray[Any],
    timelines: dict[int, "_Timeline"],
    row: int,
    column: int,
    others: list[int],
) -> int:
    """The phase in which a rank spent time that the others did not."""

    def spent_ns(rank: int) -> NDArray[Any]:
        return timelines[rank].spent_ns(began_ns[rank, column], calls.arrival_ns[rank, column])

    excess_ns = spent_ns(row) - np.median([spent_ns(other) for other in others], axis=0)
    most = int(np.argmax(excess_ns))
    if excess_ns[most] >= _EXPLAINS * late_ns[row, column]:
        return most
    # The host was on time and the device was not: it computes more slowly.
    if durations_known(calls.duration_ns[:, column : column + 1])[0]:
        return STEP_PHASES.index(StepPhase.COMPUTE)
    return NO_PHASE


class _Timeline:
    """How long one rank has been in each phase, up to any moment."""

    def __init__(self, spans: Spans) -> None:
        # Copied from the records, in which a search takes ten times as long.
        self._begin_ns = np.ascontiguousarray(spans["begin_ns"])
        self._phase = spans["phase"]
        lasted_ns = np.diff(self._begin_ns, append=self._begin_ns[-1:])
        self._before_ns = np.zeros((len(spans) + 1, len(STEP_PHASES)), dtype=np.int64)
        for phase in range(len(STEP_PHASES)):
            self._before_ns[1:, phase] = np.cumsum(np.where(self._phase == phase, lasted_ns, 0))

    def spent_ns(self, begin_ns: int, end_ns: int) -> NDArray[Any]:
        """Nanoseconds in each phase between two moments."""
        spent: NDArray[Any] = self._until(end_ns) - self._until(begin_ns)
        return spent

    def _until(self, moment_ns: int) -> NDArray[Any]:
        index = int(np.searchsorted(self._begin_ns, moment_ns, side="right")) - 1
        if index < 0:
            return np.zeros(len(STEP_PHASES), dtype=np.int64)
        until: NDArray[Any] = self._before_ns[index].copy()
        until[self._phase[index]] += moment_ns - self._begin_ns[index]
        return until
