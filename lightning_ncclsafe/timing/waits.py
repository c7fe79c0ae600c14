"""When ranks waited in collectives of any group: what a rank spends there is not its own work."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.matching import MatchedCalls

# Less is no waiting that anybody would notice; most collectives are so short.
_LEAST_NS = 100_000


class Waits:
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
        self._timelines = {
            rank: timeline for rank in begins if (timeline := _timeline(begins[rank], ends[rank])) is not None
        }

    def within_ns(self, ranks: Iterable[int], begin_ns: NDArray[Any], end_ns: NDArray[Any]) -> NDArray[Any]:
        """How long each rank waited between two moments, shapes (R, K)."""
        waited_ns = np.zeros_like(begin_ns)
        for row, rank in enumerate(ranks):
            if rank in self._timelines:
                moments_ns, waited_until_ns = self._timelines[rank]
                origin_ns = moments_ns[0]
                between = [
                    np.interp(at_ns[row] - origin_ns, moments_ns - origin_ns, waited_until_ns)
                    for at_ns in (begin_ns, end_ns)
                ]
                waited_ns[row] = between[1] - between[0]
        return waited_ns


def _timeline(begins: list[NDArray[Any]], ends: list[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Moments at which a rank begins or ceases to wait, and how long it has waited in all by then."""
    begin_ns, end_ns = np.concatenate(begins), np.concatenate(ends)
    if not len(begin_ns):
        return None
    order = np.argsort(begin_ns, kind="stable")
    begin_ns, end_ns = begin_ns[order], np.maximum.accumulate(end_ns[order])
    # Where two waits overlap, in groups that work at the same time, the second begins when the first has ended.
    begin_ns[1:] = np.maximum(begin_ns[1:], end_ns[:-1])
    moments_ns = np.column_stack([begin_ns, end_ns]).ravel()
    lasted_ns = np.column_stack([np.zeros_like(begin_ns), end_ns - begin_ns]).ravel()
    return moments_ns, np.cumsum(lasted_ns)
