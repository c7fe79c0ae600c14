"""What a rank spends its time on that is not its own work: waiting for others, in any group, or code of ours."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.matching import MatchedCalls

# Less is no waiting that anybody would notice; most collectives are so short.
_LEAST_NS = 100_000


class Intervals:
    """Intervals of each rank.

    Args:
        by_rank: Beginnings and ends, as arrays of nanoseconds; they may overlap.
    """

    def __init__(self, by_rank: Mapping[int, tuple[NDArray[Any], NDArray[Any]]]) -> None:
        self._timelines = {rank: _timeline(*intervals) for rank, intervals in by_rank.items() if len(intervals[0])}

    def within_ns(self, ranks: Iterable[int], begin_ns: NDArray[Any], end_ns: NDArray[Any]) -> NDArray[Any]:
        """How much of them there is of each rank between two moments, shapes (R, K)."""
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
    """Moments at which an interval begins or ends, and how much of them there is in all by then."""
    order = np.argsort(begin_ns, kind="stable")
    begin_ns, end_ns = begin_ns[order], np.maximum.accumulate(end_ns[order])
    # Where two overlap, in groups that work at the same time, the second begins when the first has ended.
    begin_ns[1:] = np.maximum(begin_ns[1:], end_ns[:-1])
    moments_ns = np.column_stack([begin_ns, end_ns]).ravel()
    lasted_ns = np.column_stack([np.zeros_like(begin_ns), end_ns - begin_ns]).ravel()
    return moments_ns, np.cumsum(lasted_ns)
