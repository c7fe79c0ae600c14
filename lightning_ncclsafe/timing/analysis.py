"""Analyses all ranks' windows as they arrive; runs on rank 0, in bounded memory."""

from dataclasses import dataclass
from itertools import islice

import numpy as np

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.timing.history import (
    KEPT_NS,
    LatenessHistory,
    RecentCalls,
    RecentOwnWork,
    RecentSpans,
    WorstMoments,
)
from lightning_ncclsafe.timing.lateness import Lateness, Waits, lateness
from lightning_ncclsafe.timing.matching import MatchedCalls, Matcher, Mispairing, durations_known
from lightning_ncclsafe.timing.stragglers import LEAST_LATE_NS, Step, Steps, Stragglers
from lightning_ncclsafe.timing.summary import STEP_PHASES, OpSummary, RankSummary, StepPhase, TimingSummary, bandwidth
from lightning_ncclsafe.timing.windows import Clock, GroupMembers, Window

Key = tuple[str, str]

# A program may create groups for as long as it runs; all later ones share one row.
_MOST_KEYS = 10_000
_OTHERS = GroupMembers(name="others", description="later groups")

TRACE_BYTES = 64 << 20
"""Bytes of collectives that are kept for a trace."""

_TRACE_SPANS = 2_000_000
_WORST_BYTES = 1 << 20
# Intervals of this package's own work: some minutes of a small job, some seconds of a large one.
_MOST_OWN_WORK, _MOST_OWN_WORK_OF_A_RANK = 20_000, 100
# Older ones are dropped if they are never taken.
_MOST_FRESH = 64
# Sentences on what is missing; the first ones matter most.
_MOST_MISSING = 100
# What no phase explains counts as time between hooks.
_OTHER = STEP_PHASES.index(StepPhase.OTHER)


@dataclass(kw_only=True)
class OpSums:
    """Sums for one operation on one group; times in nanoseconds.

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
    """Sums over a whole run, in bounded memory."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupMembers] = {_OTHERS.name: _OTHERS}
        self._sums: dict[Key, OpSums] = {}
        self._counts: dict[Key, dict[int, tuple[int, int]]] = {}

    def count(self, window: Window) -> None:
        """Adds all calls, compared or not."""
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
        """Adds compared calls."""
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
        """The key under which a group's operation is counted."""
        is_known = (group, op) in self._counts or (group, op) in self._sums
        is_room = len(self._counts) < _MOST_KEYS and len(self._sums) < _MOST_KEYS
        return (group, op) if is_known or is_room else (_OTHERS.name, "several")

    def summaries(self) -> tuple[OpSummary, ...]:
        """One for each group and operation, sorted by total waiting time, longest first."""
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
            bus_bandwidth=found.bus if found else None,
        )


class Analysis:
    """Analyses windows of any ranks, in any order.

    Args:
        trace_bytes: Most bytes of collectives that are kept for a trace; 0 for no trace.

    Attributes:
        history: How late each rank was over the whole run.
        calls: The last collectives.
        spans: The last phases.
        worst: The worst of all collectives before those.
        forgotten: Number of collectives before those.
    """

    def __init__(self, world_size: int, *, trace_bytes: int = TRACE_BYTES) -> None:
        self.history = LatenessHistory(world_size)
        self.calls = RecentCalls(trace_bytes)
        self.spans = RecentSpans(_TRACE_SPANS)
        self.worst = WorstMoments(min(_WORST_BYTES, trace_bytes), least_ns=LEAST_LATE_NS)
        self.forgotten = 0
        self._own_work = RecentOwnWork(max(_MOST_OWN_WORK, _MOST_OWN_WORK_OF_A_RANK * world_size))
        self._matcher = Matcher()
        self._statistics = Statistics()
        self._steps = Steps(world_size)
        self._stragglers = Stragglers(world_size)
        self._late_steps = np.zeros(world_size, dtype=np.int64)
        self._waited_ns = np.zeros(world_size)
        self._late_ns = np.zeros((world_size, len(STEP_PHASES)))
        self._clocks: dict[int, Clock] = {}
        self._began_ns = self._ended_ns = 0
        self._lost = self._left_out = self._compared_steps = 0
        self._missing: dict[str, None] = {}
        self._unaligned = 0
        self._fresh: list[tuple[MatchedCalls, Lateness]] = []

    def add(self, window: Window) -> list[Straggler]:
        """Takes a window; returns the stragglers to report: newly named, or no longer late."""
        self._clocks |= window.clocks
        self._lost += sum(window.lost.values())
        self._left_out += sum(window.left_out.values())
        self._missing = dict.fromkeys(islice({**self._missing, **dict.fromkeys(window.missing)}, _MOST_MISSING))
        self._statistics.count(window)
        self._add_spans_and_own_work(window)
        blocks = [calls for calls in self._matcher.add(window) if self._is_comparable(calls)]
        waits = Waits(blocks) if len({calls.group.name for calls in blocks}) > 1 else None
        for calls in blocks:
            self._compare(calls, waits)
        if blocks:
            # The phase in which a rank was late may be needed for a call of a minute ago, even without a trace.
            self.spans.forget(min(self.calls.began_ns, self._ended_ns - KEPT_NS))
        return self._take(self._steps.complete())

    def take_fresh(self) -> list[tuple[MatchedCalls, Lateness]]:
        """The calls compared since the last call of this method."""
        fresh, self._fresh = self._fresh, []
        return fresh

    @property
    def mispairing(self) -> Mispairing | None:
        """The first collective that ranks called differently and that has ended all the same; None without one."""
        return self._matcher.mispairing

    def finish(self) -> list[Straggler]:
        """Ends the analysis: no more windows will arrive."""
        return self._take(self._steps.complete(all_of_them=True))

    def summary(self) -> TimingSummary:
        """The results."""
        unaligned = f"{self._unaligned:,} collectives were not compared: the clocks of their ranks were not known yet."
        return TimingSummary(
            began_ns=self._began_ns,
            ended_ns=self._ended_ns,
            steps=self._compared_steps,
            ops=self._statistics.summaries(),
            ranks=tuple(self._rank(rank) for rank in range(len(self._late_steps))),
            stragglers=self._stragglers.named,
            lost=self._lost,
            left_out=self._left_out,
            unmatched=self._matcher.unmatched,
            missing=(*self._missing, *([unaligned] if self._unaligned else [])),
        )

    def _add_spans_and_own_work(self, window: Window) -> None:
        spans, own, offset_ns = window.spans.copy(), window.own.copy(), np.zeros(len(self._late_steps), dtype=np.int64)
        for rank, clock in self._clocks.items():
            offset_ns[rank] = clock.offset_ns
        spans["begin_ns"] -= offset_ns[spans["rank"]]
        self.spans.add(spans)
        own["begin_ns"] -= offset_ns[own["rank"]]
        own["end_ns"] -= offset_ns[own["rank"]]
        self._own_work.add(own)

    def _is_comparable(self, calls: MatchedCalls) -> bool:
        """Whether calls can be compared: all clocks are known, or the devices have timed the calls."""
        if (calls.uncertainty_ns >= 0).all() or durations_known(calls.duration_ns).all():
            return True
        self._unaligned += len(calls.seq)
        return False

    def _compare(self, calls: MatchedCalls, waits: Waits | None) -> None:
        began_ns = int(calls.before_ns.min() if calls.follows[0] else calls.arrival_ns.min())
        own = self._own_work.since(began_ns)
        late = lateness(calls, self.spans.by_rank, least_ns=LEAST_LATE_NS, waits=waits, own=own)
        self._began_ns = self._began_ns or int(calls.arrival_ns.min())
        self._ended_ns = max(self._ended_ns, int(calls.arrival_ns.max()))
        self._statistics.compare(calls, late)
        self._steps.add(calls, late)
        self.history.add(calls, late)
        for block in self.calls.add(calls):
            self.forgotten += len(block.seq)
            self.worst.add(block, self.spans.by_rank)
        self._fresh = [*self._fresh[-_MOST_FRESH:], (calls, late)]

    def _take(self, steps: list[Step]) -> list[Straggler]:
        for step in steps:
            self._waited_ns += step.wait_ns
            latest = int(step.late_ns.argmax())
            if step.late_ns[latest] >= LEAST_LATE_NS:
                self._late_steps[latest] += 1
                self._late_ns[latest, max(step.phase, _OTHER)] += step.late_ns[latest]
        self._compared_steps += len(steps)
        return self._stragglers.add(steps)

    def _rank(self, rank: int) -> RankSummary:
        late_s = self._late_ns[rank] / 1e9
        return RankSummary(
            rank=rank,
            steps=self._compared_steps,
            late_steps=int(self._late_steps[rank]),
            late_s=float(late_s.sum()),
            waited_s=float(self._waited_ns[rank] / 1e9),
            by_phase_s={STEP_PHASES[number]: float(late_s[number]) for number in np.flatnonzero(late_s)},
            clock=self._clocks.get(rank, Clock()),
        )
