"""The collectives of one process group as a trace draws them: nothing on a thread may overlap without nesting."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.windows import UNKNOWN_NS, GroupMembers

_LONG_AGO_NS = -(2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Collectives of one group in the order of their sequence numbers: R ranks, K collectives.

    Attributes:
        group: The group; its ``ranks`` are the rows.
        ops: Operation of each collective, K names.
        seq: Sequence numbers, shape (K,).
        size_bytes: Bytes on one rank, shape (K,).
        arrival_ns: When each rank called it, shape (R, K).
        duration_ns: Duration on each rank's device, or unknown, shape (R, K).
    """

    group: GroupMembers
    ops: list[str]
    seq: NDArray[Any]
    size_bytes: NDArray[Any]
    arrival_ns: NDArray[Any]
    duration_ns: NDArray[Any]

    @property
    def is_timed(self) -> bool:
        """Whether any duration is known."""
        return bool((self.duration_ns > UNKNOWN_NS).any())

    @property
    def title(self) -> str:
        """What the group is called on the trace."""
        return self.group.description or f"group {self.group.name}"

    def waits(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin and end of each rank's waiting for the last one, shape (R, K) each.

        A rank that has called several collectives before the last rank comes waits for the first of them first: the
        wait for the next is drawn from where that one ends.
        """
        last_ns = self.arrival_ns.max(axis=0, initial=_LONG_AGO_NS)
        over_ns = np.maximum.accumulate(last_ns)
        before_ns = np.concatenate([[_LONG_AGO_NS], over_ns[:-1]])[: len(over_ns)]
        begin_ns = np.maximum(self.arrival_ns, before_ns)
        return begin_ns, np.maximum(begin_ns, last_ns)

    def runs(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin and end of each collective on each rank's device, shape (R, K) each; of no meaning where not timed.

        The collectives of a group run one after the other, none before it is called: the earliest times at which they
        can have run. With D the sum of durations, ``end[k] = max(arrival[k], end[k - 1]) + duration[k]`` is
        ``D[k] + max(arrival[j] - D[j - 1] for j <= k)``.
        """
        is_timed = self.duration_ns > UNKNOWN_NS
        taken_ns = np.where(is_timed, self.duration_ns, 0)
        sum_ns = np.cumsum(taken_ns, axis=1)
        ahead_ns = np.where(is_timed, self.arrival_ns - (sum_ns - taken_ns), _LONG_AGO_NS)
        end_ns = np.maximum.accumulate(ahead_ns, axis=1) + sum_ns
        return end_ns - taken_ns, end_ns


def tracks_of(calls: Sequence[MatchedCalls], columns: Sequence[NDArray[Any]]) -> list[Track]:
    """The kept collectives of all blocks, by group."""
    blocks: dict[tuple[str, tuple[int, ...]], list[tuple[MatchedCalls, NDArray[Any]]]] = defaultdict(list)
    for block, kept in zip(calls, columns, strict=True):
        if kept.any():
            blocks[block.group.name, block.group.ranks].append((block, np.flatnonzero(kept)))
    return [_track(parts) for parts in blocks.values()]


def _track(parts: list[tuple[MatchedCalls, NDArray[Any]]]) -> Track:
    seq = np.concatenate([block.seq[kept] for block, kept in parts])
    order = np.argsort(seq, kind="stable")
    ops = [*_op_names(parts)]
    return Track(
        group=parts[-1][0].group,
        ops=[ops[number] for number in order],
        seq=seq[order],
        size_bytes=np.concatenate([block.size_bytes[kept] for block, kept in parts])[order],
        arrival_ns=np.concatenate([block.arrival_ns[:, kept] for block, kept in parts], axis=1)[:, order],
        duration_ns=np.concatenate([block.duration_ns[:, kept] for block, kept in parts], axis=1)[:, order],
    )


def _op_names(parts: list[tuple[MatchedCalls, NDArray[Any]]]) -> Iterator[str]:
    for block, kept in parts:
        for number in block.op[kept].tolist():
            yield block.ops[number]
