"""Sums over all collectives of a run, by group and operation."""

from dataclasses import dataclass

from lightning_ncclsafe.timing.bandwidth import bandwidth
from lightning_ncclsafe.timing.lateness import Lateness
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.summary import OpSummary
from lightning_ncclsafe.timing.windows import GroupMembers, Window

Key = tuple[str, str]

# A program may make groups for as long as it runs; what comes after so many is one row.
_MOST_KEYS = 10_000
_OTHERS = GroupMembers(name="others", description="later groups")


@dataclass(kw_only=True)
class OpSums:
    """What is added up of one operation on one group; times in nanoseconds.

    Attributes:
        compared: Calls that were compared among all members.
        size_bytes: Their bytes, on one rank each.
        skew_ns: Between first and last arrival.
        wait_ns: Mean wait of the ranks in a call.
        timed: Calls for which durations are known.
        transfer_ns: Their shortest durations.
        timed_bytes: Their bytes, on one rank each.
    """

    compared: int = 0
    size_bytes: int = 0
    skew_ns: float = 0.0
    wait_ns: float = 0.0
    timed: int = 0
    transfer_ns: float = 0.0
    timed_bytes: int = 0


class Statistics:
    """Adds up, for as long as a run lasts, in memory that does not grow with it."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupMembers] = {_OTHERS.name: _OTHERS}
        self._sums: dict[Key, OpSums] = {}
        self._counts: dict[Key, dict[int, tuple[int, int]]] = {}

    def count(self, window: Window) -> None:
        """Adds what ranks have called, compared or not."""
        for group in window.groups:
            may_know = group.ranks if group.name in self._groups else len(self._groups) < _MOST_KEYS
            if may_know:
                self._groups[group.name] = group
        for rank, totals in window.totals.items():
            for total in totals:
                counts = self._counts.setdefault(self._key(total.group, total.op), {})
                count, size_bytes = counts.get(rank, (0, 0))
                counts[rank] = (count + total.count, size_bytes + total.size_bytes)

    def compare(self, calls: MatchedCalls, late: Lateness) -> None:
        """Adds what was compared."""
        for number, op in enumerate(calls.ops):
            chosen = calls.op == number
            if not chosen.any():
                continue
            timed = chosen & (late.transfer_ns >= 0)
            sums = self._sums.setdefault(self._key(calls.group.name, op), OpSums())
            sums.compared += int(chosen.sum())
            sums.size_bytes += int(calls.size_bytes[chosen].sum())
            sums.skew_ns += float(late.skew_ns[chosen].sum())
            sums.wait_ns += float(late.wait_ns[:, chosen].mean(axis=0).sum())
            sums.timed += int(timed.sum())
            sums.transfer_ns += float(late.transfer_ns[timed].sum())
            sums.timed_bytes += int(calls.size_bytes[timed].sum())

    def _key(self, group: str, op: str) -> Key:
        """What a group's operation is counted with."""
        is_known = (group, op) in self._counts or (group, op) in self._sums
        is_room = len(self._counts) < _MOST_KEYS and len(self._sums) < _MOST_KEYS
        return (group, op) if is_known or is_room else (_OTHERS.name, "several")

    def summaries(self) -> tuple[OpSummary, ...]:
        """One for each group and operation, those on which ranks waited longest in all first."""
        made = [self._summary(key) for key in {**self._counts, **self._sums}]
        return tuple(sorted(made, key=lambda one: (-one.wait_s * one.compared, -one.count, one.group, one.op)))

    def _summary(self, key: Key) -> OpSummary:
        group, sums = self._groups.get(key[0], GroupMembers(name=key[0])), self._sums.get(key, OpSums())
        count, counted_bytes = max(self._counts.get(key, {}).values(), default=(sums.compared, sums.size_bytes))
        transfer_s = sums.transfer_ns / sums.timed / 1e9 if sums.timed else None
        found = (
            bandwidth(key[1], ranks=len(group.ranks), size_bytes=sums.timed_bytes / sums.timed, seconds=transfer_s)
            if transfer_s is not None
            else None
        )
        return OpSummary(
            group=group.name,
            description=group.description,
            backend=group.backend,
            op=key[1],
            ranks=len(group.ranks),
            count=count,
            size_bytes=counted_bytes / max(count, 1),
            compared=sums.compared,
            skew_s=sums.skew_ns / max(sums.compared, 1) / 1e9,
            wait_s=sums.wait_ns / max(sums.compared, 1) / 1e9,
            transfer_s=transfer_s,
            algorithm_bandwidth=found.algorithm if found else None,
            bus_bandwidth=found.bus if found else None,
        )
