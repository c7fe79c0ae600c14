"""Which collectives and phases go into a trace, where there are more than its reader can open."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.windows import UNKNOWN_NS

# Of the room for collectives, what goes to those with the greatest skew, then to the newest; the rest is spread evenly.
_SHARE_OF_SKEWED = 0.5
_SHARE_OF_NEWEST = 0.25
# The share of the room for phases if there is not enough for everything.
_SHARE_OF_SPANS = 0.75
# How often fewer collectives are tried, until they and their phases fit.
_TRIES = 6
_ENOUGH_SPANS = 50_000
# Multiples of it, cut to their fraction, are spread evenly however many of them are taken: Weyl's sequence.
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to draw.

    Attributes:
        columns: For each block of calls, which of its collectives, bool of shape (K,).
        spans: Which spans, bool of shape (number of spans,).
        collectives: Number of collectives that were left out.
        phases: Number of spans that were left out.
    """

    columns: list[NDArray[Any]]
    spans: NDArray[Any]
    collectives: int
    phases: int


@dataclass(frozen=True, slots=True)
class _Columns:
    """All collectives of all blocks, one after the other: events that each costs, skew, begin, end; shape (K,) each."""

    cost: NDArray[Any]
    skew_ns: NDArray[Any]
    begin_ns: NDArray[Any]
    end_ns: NDArray[Any]


def select(calls: Sequence[MatchedCalls], begin_ns: NDArray[Any], end_ns: NDArray[Any], most_events: int) -> Selection:
    """All of it where it fits; else the collectives of greatest skew, the newest and evenly spaced others.

    A collective is kept for all ranks or for none. Of the phases, those that a kept collective waited for are kept,
    the longest first.

    Args:
        begin_ns: Begins of the spans, shape (number of spans,).
        most_events: Room for both.
    """
    parts = [_of_block(block) for block in calls]
    empty = [np.zeros(0, dtype=np.int64)]
    found = _Columns(*(np.concatenate([part[number] for part in parts] or empty) for number in range(4)))
    kept, spans = np.ones(len(found.cost), dtype=bool), np.ones(len(begin_ns), dtype=bool)
    if found.cost.sum() + len(begin_ns) > most_events:
        kept, spans = _fitting(found, begin_ns, end_ns, most_events)
    ends = np.cumsum([len(block.seq) for block in calls])
    return Selection(
        columns=np.split(kept, ends[:-1]) if len(calls) else [],
        spans=spans,
        collectives=int((~kept).sum()),
        phases=int((~spans).sum()),
    )


def _of_block(block: MatchedCalls) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """A wait for each rank, and a collective where its duration is known.

    Its time begins when all ranks had called the collective before it: what a rank does from then on is why it is late.
    """
    first_ns, last_ns = block.arrival_ns.min(axis=0), block.arrival_ns.max(axis=0)
    cost = len(block.group.ranks) + (block.duration_ns > UNKNOWN_NS).sum(axis=0)
    before_ns = np.minimum(np.concatenate([[block.before_ns.max()], last_ns[:-1]]), first_ns)
    return cost, last_ns - first_ns, before_ns, last_ns


def _fitting(
    found: _Columns, begin_ns: NDArray[Any], end_ns: NDArray[Any], most_events: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """As many collectives as fit together with their phases; where phases would push them out, the longest phases."""
    room, least = float(most_events), most_events * (1 - _SHARE_OF_SPANS)
    # An odd distance, as phases mostly come in twos or fours. Of some, it is known well enough how many there are.
    every = len(begin_ns) // _ENOUGH_SPANS | 1
    for _ in range(_TRIES):
        kept = _kept_columns(found, room)
        events = found.cost[kept].sum() + every * len(_meeting(found, kept, begin_ns[::every], end_ns[::every]))
        if events <= most_events or room <= least:
            break
        room = max(room * 0.98 * most_events / events, least)
    spans = _meeting(found, kept, begin_ns, end_ns)
    # Of phases that last as long, ranks keep those of the same time.
    longest = spans[np.lexsort((begin_ns[spans], (begin_ns - end_ns)[spans]))]
    is_kept = np.zeros(len(begin_ns), dtype=bool)
    is_kept[longest[: most_events - int(found.cost[kept].sum())]] = True
    return kept, is_kept


def _kept_columns(found: _Columns, room: float) -> NDArray[Any]:
    kept = np.zeros(len(found.cost), dtype=bool)
    spread = np.argsort(np.arange(len(kept)) * _GOLDEN_RATIO % 1.0)
    by_time = np.argsort(found.end_ns, kind="stable")
    orders = (
        (np.argsort(-found.skew_ns, kind="stable"), room * _SHARE_OF_SKEWED),
        (by_time[::-1], room * (_SHARE_OF_SKEWED + _SHARE_OF_NEWEST)),
        (by_time[spread], room),
    )
    for order, until in orders:
        left = order[~kept[order]]
        kept[left[np.cumsum(found.cost[left]) <= until - found.cost[kept].sum()]] = True
    return kept


def _meeting(found: _Columns, kept: NDArray[Any], begin_ns: NDArray[Any], end_ns: NDArray[Any]) -> NDArray[Any]:
    """Positions of the spans that reach into the time of a kept collective."""
    if not kept.any():
        return np.zeros(0, dtype=np.intp)
    order = np.argsort(found.begin_ns[kept])
    begins = found.begin_ns[kept][order]
    latest_end = np.maximum.accumulate(found.end_ns[kept][order])
    # Of the times that begin before the span ends, one reaches into it.
    before = np.searchsorted(begins, end_ns, side="left") - 1
    return np.flatnonzero((before >= 0) & (latest_end[before] > begin_ns))
