"""Lateness by step: what the collectives of one training batch come to, for each rank."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.lateness import NO_PHASE, Lateness
from lightning_ncclsafe.timing.matching import MatchedCalls

# A step is complete once the one after next has been seen: ranks fetch data one batch ahead.
_AHEAD = 2
# What some ranks say comes by way of others, a turn or two later; for a group that says nothing nobody waits longer.
_LAG_NS = 10_000_000_000


@dataclass(slots=True, kw_only=True)
class Step:
    """One step of all ranks.

    Attributes:
        number: Counts training batches.
        began_ns: First arrival at its first collective, on the reference clock.
        late_ns: How late each rank was in it, shape (world size,): in all, for the group for which it was latest. A
            delay that shows in several groups is one.
        wait_ns: How long each rank waited, shape (world size,).
        phase: Phase in which the rank that was latest fell behind.
        op: The collective for which it was.
        worst_ns: How late it was for that one.
        by_group_ns: The same as ``late_ns`` for each group.
    """

    number: int
    began_ns: int
    late_ns: NDArray[Any]
    wait_ns: NDArray[Any]
    phase: int = NO_PHASE
    op: str = ""
    worst_ns: float = 0.0
    by_group_ns: dict[str, NDArray[Any]] = field(default_factory=dict)


class Steps:
    """Puts together what different groups and blocks say of the same step.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: dict[int, Step] = {}
        self._newest: dict[str, tuple[int, int]] = {}

    def add(self, calls: MatchedCalls, late: Lateness) -> None:
        """Adds a block of collectives."""
        self._newest[calls.group.name] = (int(calls.step.max()), int(calls.arrival_ns.max()))
        ranks = list(calls.group.ranks)
        for chosen in _runs(calls.step):
            number, arrival_ns = int(calls.step[chosen.start]), int(calls.arrival_ns[:, chosen].min())
            step = self._open.get(number) or self._new(number, arrival_ns)
            step.began_ns = min(step.began_ns, arrival_ns)
            own_ns = step.by_group_ns.setdefault(calls.group.name, np.zeros(self._world_size))
            own_ns[ranks] += late.late_ns[:, chosen].sum(axis=1)
            np.maximum(step.late_ns, own_ns, out=step.late_ns)
            step.wait_ns[ranks] += late.wait_ns[:, chosen].sum(axis=1)
            if step.late_ns.any():
                self._explain(step, calls, late, chosen)

    def complete(self, *, all_of_them: bool = False) -> list[Step]:
        """The steps to which nothing is added any more, in order; they are given once."""
        latest_ns = max((at_ns for _, at_ns in self._newest.values()), default=0)
        # A group that has said nothing for longer is not waited for, and is new when it calls again.
        self._newest = {name: told for name, told in self._newest.items() if told[1] >= latest_ns - _LAG_NS}
        newest = min((number for number, _ in self._newest.values()), default=0)
        done = [number for number in sorted(self._open) if all_of_them or number <= newest - _AHEAD]
        return [self._open.pop(number) for number in done]

    def _new(self, number: int, began_ns: int) -> Step:
        step = self._open[number] = Step(
            number=number, began_ns=began_ns, late_ns=np.zeros(self._world_size), wait_ns=np.zeros(self._world_size)
        )
        return step

    def _explain(self, step: Step, calls: MatchedCalls, late: Lateness, chosen: slice) -> None:
        part = late.late_ns[:, chosen]
        row, column = divmod(int(part.argmax()), part.shape[1])
        if part[row, column] > step.worst_ns:
            step.worst_ns = float(part[row, column])
            step.phase = int(late.phase[row, chosen.start + column])
            step.op = calls.ops[int(calls.op[chosen.start + column])]


def _runs(numbers: NDArray[Any]) -> list[slice]:
    """Where neighbours are equal; mostly a step's collectives are neighbours."""
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return [slice(begin, end) for begin, end in pairwise(edges)]
