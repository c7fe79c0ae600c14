"""Names a rank that keeps the others waiting repeatedly, step by step; not one that was late for a moment."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.timing.lateness import NO_PHASE, Lateness
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.summary import STEP_PHASES

# A step is complete once the one after next has been seen: ranks fetch data one batch ahead.
_AHEAD = 2
# Windows of some ranks are passed on by others, a turn or two later; a group that is silent for longer is not waited
# for.
_LAG_NS = 10_000_000_000

# The conditions for naming a rank; all of them are here, for the whole package.

WINDOW_STEPS = 200
"""Steps that are looked at together."""

LEAST_LATE_NS = 2e6
"""What a busy host's scheduler alone does to any rank; less is never called late."""

LEAST_STEPS = 50
"""Fewest steps to judge. A straggler is late in about a tenth of them, and at least eight times; of fewer steps, a
single hiccup of the host would be a tenth."""

WARM_UP_STEPS = 10
"""First batches of a call that do not count: the sanity check's two; the first of training, with compilation, the
start of loader workers and the allocator's first; the second, for which DDP rebuilds its buckets; and some for a rank
that was behind to catch up."""

# Bursts of something else on a host last some hundred milliseconds.
_LEAST_SPAN_NS = 1e9
# Less than this share of a step is never called late, either.
_LEAST_OF_STEP = 0.02
# Factor between the thresholds of lateness that are tried.
_FINER = 1.4
_LEAST_LATE_STEPS = 8
# Waiting for it must cost at least this share of the time.
_LEAST_COST = 0.005
# The share of steps in which one of two equal ranks is the late one by chance.
_CHANCE = 5e-3
# A rank that is late in less than half of the steps has to be later than any rank is on a busy host.
_SELDOM, _LEAST_SELDOM_NS, _LEAST_SELDOM_OF_STEP = 0.5, 8e6, 0.05
# It is late throughout, and not in one burst of something else: in this many parts, each of some steps and some time.
_PART_STEPS, _PART_NS, _LEAST_PARTS, _LEAST_OF_PARTS = 10, 1e8, 6, 0.7
# This share of the late steps must be its own: of two ranks most, of many three times its share.
_OWN_SHARE, _TIMES_FAIR_SHARE = 0.8, 3.0


@dataclass(slots=True, kw_only=True)
class Step:
    """One step of all ranks.

    Attributes:
        number: Counts training batches.
        began_ns: First arrival at its first collective, on the reference clock.
        late_ns: How late each rank was in it, shape (world size,): the sum for the group in which it was latest, as a
            delay that shows in several groups is one.
        wait_ns: How long each rank waited, shape (world size,).
        phase: Phase in which the rank that was latest fell behind.
        op: The collective for which it was latest.
        worst_ns: How late it was for that collective.
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
    """Combines what different groups and blocks show of the same step."""

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
        """The steps to which nothing will be added, in order; each is returned once."""
        latest_ns = max((at_ns for _, at_ns in self._newest.values()), default=0)
        # A group that was silent for longer is not waited for, and is new when it calls again.
        self._newest = {name: entry for name, entry in self._newest.items() if entry[1] >= latest_ns - _LAG_NS}
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


class Stragglers:
    """Looks at the last :data:`WINDOW_STEPS` steps again whenever there are new ones."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._steps: deque[Step] = deque(maxlen=WINDOW_STEPS)
        self._named: dict[int, Straggler] = {}
        self._not_late_for: Counter[int] = Counter()

    @property
    def named(self) -> tuple[Straggler, ...]:
        """All ranks that were named, in that order, even if they have recovered; with current numbers."""
        return tuple(self._named.values())

    def add(self, steps: Iterable[Step]) -> list[Straggler]:
        """Takes new steps; returns the stragglers to report: newly named, or no longer late."""
        new = [step for step in steps if step.number >= WARM_UP_STEPS]
        self._steps.extend(new)
        is_enough = len(self._steps) >= LEAST_STEPS and self._span_ns() >= _LEAST_SPAN_NS
        if not new or self._world_size < 2 or not is_enough:
            return []
        found = {straggler.rank: straggler for straggler in self._find()}
        return [*self._name(found), *self._release(found, len(new))]

    def _span_ns(self) -> float:
        return float(self._steps[-1].began_ns - self._steps[0].began_ns)

    def _name(self, found: dict[int, Straggler]) -> Iterator[Straggler]:
        for rank, straggler in found.items():
            known = self._named.get(rank)
            self._not_late_for[rank] = 0
            if known is None or known.is_over:
                self._named[rank] = straggler
                yield straggler
            else:
                self._named[rank] = replace(straggler, since_ns=known.since_ns)
                if known.phase != straggler.phase and straggler.phase:
                    yield self._named[rank]

    def _release(self, found: dict[int, Straggler], new_steps: int) -> Iterator[Straggler]:
        """Releases ranks that have recovered: all their late steps have left the window."""
        for rank, known in [*self._named.items()]:
            if rank in found or known.is_over:
                continue
            self._not_late_for[rank] += new_steps
            if self._not_late_for[rank] >= WINDOW_STEPS:
                self._named[rank] = replace(known, is_over=True)
                yield self._named[rank]

    def _find(self) -> Iterator[Straggler]:
        late_ns = np.stack([step.late_ns for step in self._steps])
        latest, worst_ns = late_ns.argmax(axis=1), late_ns.max(axis=1)
        least_ns = max(LEAST_LATE_NS, _LEAST_OF_STEP * self._span_ns() / len(self._steps))
        found: set[int] = set()
        # A rank that is sometimes 20 ms late only stands out without the lateness that happens to all ranks.
        while least_ns <= worst_ns.max():
            is_late = worst_ns >= least_ns
            ranks, counts = np.unique(latest[is_late], return_counts=True)
            for rank in ranks[counts >= _LEAST_LATE_STEPS].tolist():
                if rank not in found and self._stands_out(is_late, is_late & (latest == rank), worst_ns):
                    found.add(rank)
                    yield self._straggler(rank, is_late & (latest == rank), worst_ns)
            least_ns *= _FINER

    def _stands_out(self, is_late: NDArray[Any], is_own: NDArray[Any], worst_ns: NDArray[Any]) -> bool:
        own, late = int(is_own.sum()), int(is_late.sum())
        return bool(
            own / late >= min(_OWN_SHARE, _TIMES_FAIR_SHARE / self._world_size)
            and worst_ns[is_own].mean() >= self._least_mean_ns(own)
            and worst_ns[is_own].sum() >= _LEAST_COST * self._span_ns()
            and self._is_throughout(is_own)
            # Any rank may be the straggler: with more ranks, a smaller number of late steps stands out.
            and _chance(own, late, 1 / self._world_size) <= _CHANCE * (2 / self._world_size) ** 4
        )

    def _is_throughout(self, is_own: NDArray[Any]) -> bool:
        steps = max(_PART_STEPS, int(_PART_NS * len(is_own) / self._span_ns()))
        parts = [is_own[begin : begin + steps].any() for begin in range(0, len(is_own), steps)]
        return bool(sum(parts) >= min(_LEAST_PARTS, _LEAST_OF_PARTS * len(parts)))

    def _least_mean_ns(self, own: int) -> float:
        if own >= _SELDOM * len(self._steps):
            return LEAST_LATE_NS
        return max(_LEAST_SELDOM_NS, _LEAST_SELDOM_OF_STEP * self._span_ns() / len(self._steps))

    def _straggler(self, rank: int, is_own: NDArray[Any], worst_ns: NDArray[Any]) -> Straggler:
        own = [step for step, is_its in zip(self._steps, is_own, strict=True) if is_its]
        phases, ops = Counter[int](), Counter[str]()
        for step in own:
            phases[step.phase] += int(step.worst_ns)
            ops[step.op] += 1
        phase = phases.most_common(1)[0][0]
        return Straggler(
            rank=rank,
            phase=STEP_PHASES[phase].value if phase != NO_PHASE else "",
            share=round(len(own) / len(self._steps), 4),
            of_steps=len(self._steps),
            mean_s=round(float(worst_ns[is_own].mean()) / 1e9, 6),
            op=ops.most_common(1)[0][0],
            since_ns=own[0].began_ns,
            until_ns=own[-1].began_ns,
        )


def _chance(own: int, late: int, probability: float) -> float:
    """How probable it is that one rank is the latest in at least ``own`` of ``late`` steps by chance: binomial."""
    return sum(
        comb(late, count) * probability**count * (1 - probability) ** (late - count) for count in range(own, late + 1)
    )
