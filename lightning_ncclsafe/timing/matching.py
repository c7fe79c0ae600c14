"""Matches the calls of all members of a group: equal sequence numbers are the same collective, or should be."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.summary import plain_op
from lightning_ncclsafe.timing.windows import UNKNOWN_NS, Calls, Clock, GroupMembers, Window

# Most rows, of all groups together, that wait for a member's calls: 64 MB.
_MOST_PENDING = 1_000_000
# A call that not all members have reported by then is given up, by the clock of the calls themselves.
_GIVE_UP_NS = 60_000_000_000
# A program may create groups for as long as it runs; a forgotten one that is called again is a new one.
_MOST_GROUPS = 10_000
# Operations for which every rank gives as many bytes, by the names of their entries; those of others may differ.
_OF_EQUAL_SIZES = frozenset(
    {"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base", "all_reduce_barrier"}
)
# Calls that are further apart may be those of two groups of one name, the second made after the first has ended.
_SAME_TIME_NS = 5_000_000_000
# Each rank may give another size; all ranks read what was found, and each call is reported by one of them.
_MOST_DIFFERENT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCall:
    """What some ranks called in a collective in which others called something else.

    Attributes:
        op: The operation, ``"all_reduce"``.
        size_bytes: Bytes on one rank.
        ranks: Global ranks, ascending.
    """

    op: str
    size_bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mispairing:
    """A collective that has ended on all ranks of a group although they had called different ones.

    NCCL compares neither operations nor sizes. Calls of the same number exchange their data, whatever they are.

    Attributes:
        group: Name of the process group.
        description: Its purpose.
        seq: The number of the call.
        step: Training batch that the first rank called it in.
        calls: The different calls, those of most ranks first; the first four.
        other_ranks: How many ranks have made other calls than these.
    """

    group: str
    description: str = ""
    seq: int
    step: int
    calls: tuple[PairedCall, ...]
    other_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedCalls:
    """Collectives of one group that all its members have called: R ranks, K collectives.

    Attributes:
        group: The group; its ``ranks`` are the rows.
        ops: Names of operations.
        op: Position in ``ops`` of each collective, shape (K,).
        seq: Sequence numbers, ascending, shape (K,).
        step: Training batch that the first rank called it in, shape (K,).
        size_bytes: Bytes on one rank, shape (K,).
        arrival_ns: When each rank called it, on the reference clock, shape (R, K).
        duration_ns: Duration on each rank's device, or :data:`UNKNOWN_NS`, shape (R, K).
        uncertainty_ns: Bound of the error of a rank's arrivals relative to those of another, shape (R,).
        before_ns: Arrivals at the collective before the first column, shape (R,).
        follows: Whether the collective before it in sequence is the column to its left, or for the first column the
            one of ``before_ns``, shape (K,).
    """

    group: GroupMembers
    ops: tuple[str, ...]
    op: NDArray[Any]
    seq: NDArray[Any]
    step: NDArray[Any]
    size_bytes: NDArray[Any]
    arrival_ns: NDArray[Any]
    duration_ns: NDArray[Any]
    uncertainty_ns: NDArray[Any]
    before_ns: NDArray[Any]
    follows: NDArray[Any]


class Matcher:
    """Takes windows as they arrive, and returns the calls that all members of a group have made.

    Attributes:
        unmatched: Calls that were given up, as not all members reported them.
        mispairing: The first collective that ranks called differently and that has ended on all of them; None if there
            was none.
    """

    def __init__(self) -> None:
        self._pending: dict[str, list[Calls]] = defaultdict(list)
        self._ops: dict[str, int] = {}
        self._groups: dict[str, GroupMembers] = {}
        self._clocks: dict[int, Clock] = {}
        self._last: dict[str, tuple[int, NDArray[Any]]] = {}
        self._newest_ns: dict[int, int] = {}
        self.unmatched = 0
        self.mispairing: Mispairing | None = None

    def add(self, window: Window) -> list[MatchedCalls]:
        """Adds a window; returns what can be matched now, by group."""
        self._clocks |= window.clocks
        for group in window.groups:
            known = self._groups.pop(group.name, group)
            self._groups[group.name] = group if group.ranks and group != known else known
        self._newest_ns |= _newest_ns(window.calls)
        # Each window numbers its operations for itself.
        numbers = np.array([self._ops.setdefault(op, len(self._ops)) for op in window.ops], dtype="<u2")
        for number in np.unique(window.calls["group"]):
            calls = window.calls[window.calls["group"] == number]
            calls["op"] = numbers[calls["op"]]
            self._pending[window.groups[number].name].append(calls)
        found = [matched for name in [*self._pending] if (matched := self._match(name)) is not None]
        self._forget_groups()
        return found

    def _forget_groups(self) -> None:
        """Forgets the groups that were called longest ago, unless calls of theirs wait for a member."""
        if (too_many := len(self._groups) - _MOST_GROUPS) > 0:
            for name in [name for name in self._groups if name not in self._pending][:too_many]:
                del self._groups[name]
                self._last.pop(name, None)

    def _match(self, name: str) -> MatchedCalls | None:
        group = self._groups[name]
        calls = np.concatenate(self._pending[name])
        if not group.ranks:  # a rank that has not reported the group yet may know them
            self._keep(name, _first_of_each(calls))
            return None
        calls = _first_of_each(calls[np.isin(calls["rank"], group.ranks)])
        seq, reports = np.unique(calls["seq"], return_counts=True)
        whole = seq[reports == len(group.ranks)]
        is_whole = np.isin(calls["seq"], whole)
        self._keep(name, calls[~is_whole])
        if not len(whole) or len(group.ranks) < 2:
            return None
        # Sorted by rank, then by number, these are the rows of a matrix.
        return self._matched(group, calls[is_whole].reshape(len(group.ranks), len(whole)))

    def _matched(self, group: GroupMembers, table: Calls) -> MatchedCalls:
        clocks = [self._clocks.get(rank, Clock()) for rank in group.ranks]
        offset_ns = np.array([clock.offset_ns for clock in clocks], dtype=np.int64)
        seq, arrival_ns = table["seq"][0], table["created_ns"] - offset_ns[:, None]
        last_seq, before_ns = self._last.get(group.name, (-1, arrival_ns[:, 0]))
        # Where numbers begin again, a group has been made again, and its calls may be those of different ones.
        later = seq > last_seq
        self.mispairing = self.mispairing or self._mispairing(group, table[:, later], arrival_ns[:, later])
        self._last[group.name] = (int(seq[-1]), arrival_ns[:, -1].copy())
        return MatchedCalls(
            group=group,
            ops=tuple(self._ops),
            op=table["op"][0].astype(np.int64),
            # Copies: a view of one column would keep the whole table.
            seq=seq.copy(),
            step=table["step"][0].copy(),
            size_bytes=table["size_bytes"].max(axis=0),
            arrival_ns=arrival_ns,
            duration_ns=table["duration_ns"].copy(),
            uncertainty_ns=np.array([clock.uncertainty_ns for clock in clocks], dtype=np.int64),
            before_ns=before_ns,
            follows=np.diff(seq, prepend=last_seq) == 1,
        )

    def _mispairing(self, group: GroupMembers, table: Calls, arrival_ns: NDArray[Any]) -> Mispairing | None:
        """The first column in which ranks differ, if it has ended on all of them; shapes are (R, K)."""
        if not table.size:
            return None
        op, size_bytes = table["op"], table["size_bytes"]
        has_equal_sizes = np.isin(op[0], [self._ops[name] for name in _OF_EQUAL_SIZES & self._ops.keys()])
        # Ranks may call one operation by different functions, all_gather and all_gather_into_tensor.
        kinds: dict[str, int] = {}
        kind = np.array([kinds.setdefault(plain_op(name), len(kinds)) for name in self._ops])[op]
        differs = (kind != kind[0]).any(axis=0) | (has_equal_sizes & (size_bytes != size_bytes[0]).any(axis=0))
        # Only back ends that time calls on the device complete different ones with each other.
        differs &= durations_known(table["duration_ns"]) & (np.ptp(arrival_ns, axis=0) < _SAME_TIME_NS)
        if not differs.any():
            return None
        column, ops = int(differs.argmax()), tuple(self._ops)
        sides: dict[tuple[str, int], list[int]] = defaultdict(list)
        for row, rank in enumerate(group.ranks):
            sides[ops[op[row, column]], int(size_bytes[row, column])].append(rank)
        calls = [PairedCall(op=op, size_bytes=size, ranks=tuple(ranks)) for (op, size), ranks in sides.items()]
        calls.sort(key=lambda call: (-len(call.ranks), call.ranks))
        return Mispairing(
            group=group.name,
            description=group.description,
            seq=int(table["seq"][0, column]),
            step=int(table["step"][0, column]),
            calls=tuple(calls[:_MOST_DIFFERENT]),
            other_ranks=sum(len(call.ranks) for call in calls[_MOST_DIFFERENT:]),
        )

    def _keep(self, name: str, calls: Calls) -> None:
        """Keeps calls that some members have not reported yet, but not forever."""
        age_ns = self._age_ns(calls)
        youngest = np.argsort(age_ns, kind="stable")[: _MOST_PENDING // max(len(self._pending), 1)]
        kept = calls[youngest[age_ns[youngest] < _GIVE_UP_NS]]
        self.unmatched += len(calls) - len(kept)
        if len(kept):
            self._pending[name] = [kept]
        else:
            del self._pending[name]

    def _age_ns(self, calls: Calls) -> NDArray[Any]:
        """How much older than its rank's newest, in any group, each call is: clocks of ranks may be far apart."""
        ranks, row = np.unique(calls["rank"], return_inverse=True)
        newest_ns = np.array([self._newest_ns[rank] for rank in ranks.tolist()], dtype=np.int64)
        age_ns: NDArray[Any] = newest_ns[row] - calls["created_ns"]
        return age_ns


def _newest_ns(calls: Calls) -> dict[int, int]:
    """When each rank has made its newest call."""
    ranks, row = np.unique(calls["rank"], return_inverse=True)
    newest_ns = np.zeros(len(ranks), dtype=np.int64)
    np.maximum.at(newest_ns, row, calls["created_ns"])
    return dict(zip(ranks.tolist(), newest_ns.tolist(), strict=True))


def _first_of_each(calls: Calls) -> Calls:
    """Sorted by rank and sequence number; of operations that were coalesced under one number, the first."""
    next_seq, next_rank = np.diff(calls["seq"]), np.diff(calls["rank"])
    if ((next_rank > 0) | ((next_rank == 0) & (next_seq > 0))).all():
        return calls  # usually sorted already, and sorting takes ten times as long
    order = np.lexsort((calls["created_ns"], calls["seq"], calls["rank"]))
    ordered = calls[order]
    is_new: NDArray[Any] = np.ones(len(ordered), dtype=bool)
    is_new[1:] = np.logical_or(np.diff(ordered["seq"]), np.diff(ordered["rank"]))
    first: Calls = ordered[is_new]
    return first


def durations_known(duration_ns: NDArray[Any]) -> NDArray[Any]:
    """For which collectives every rank's duration is known, shape (K,)."""
    return np.asarray((duration_ns > UNKNOWN_NS).all(axis=0))
