"""Makes of all ranks' windows what is told of them; runs on rank 0, bit by bit, in bounded memory."""

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
from lightning_ncclsafe.timing.lateness import Lateness, lateness
from lightning_ncclsafe.timing.matching import MatchedCalls, Matcher, durations_known
from lightning_ncclsafe.timing.statistics import Statistics
from lightning_ncclsafe.timing.step_phases import STEP_PHASES, StepPhase
from lightning_ncclsafe.timing.steps import Step, Steps
from lightning_ncclsafe.timing.stragglers import LEAST_LATE_NS, Stragglers
from lightning_ncclsafe.timing.summary import RankSummary, TimingSummary
from lightning_ncclsafe.timing.waits import Waits
from lightning_ncclsafe.timing.windows import Clock, Window

TRACE_BYTES = 64 << 20
"""Of collectives that are kept for a trace."""

_TRACE_SPANS = 2_000_000
_WORST_BYTES = 1 << 20
# Rows of our own work: some minutes' worth of a small job, and of a large one some seconds'.
_MOST_OWN_WORK, _MOST_OWN_WORK_OF_A_RANK = 20_000, 100
# Should nobody take them.
_MOST_FRESH = 64
# Sentences on what could not be had; the first ones tell most.
_MOST_MISSING = 100
# What no phase explains is counted with what is between hooks.
_OTHER = STEP_PHASES.index(StepPhase.OTHER)


class Analysis:
    """Takes windows of any ranks in any order.

    Args:
        world_size: Number of ranks.
        trace_bytes: Most bytes of collectives that are kept for a trace; 0 where there will be none.

    Attributes:
        history: How late each rank was over the whole run.
        calls: The last collectives.
        spans: The last phases.
        worst: The worst of all collectives before those.
        forgotten: Number of those.
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
        """Takes a window; returns stragglers to tell of: newly named, or no longer late."""
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
            # In which phase a rank was late is asked for a call of a minute ago, too, also where no trace is kept.
            self.spans.forget(min(self.calls.began_ns, self._ended_ns - KEPT_NS))
        return self._take(self._steps.complete())

    def take_fresh(self) -> list[tuple[MatchedCalls, Lateness]]:
        """What was compared since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def finish(self) -> list[Straggler]:
        """No more windows will come."""
        return self._take(self._steps.complete(all_of_them=True))

    def summary(self) -> TimingSummary:
        """What it has come to."""
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
            missing=(*self._missing, *self._not_aligned()),
        )

    def _not_aligned(self) -> tuple[str, ...]:
        if not self._unaligned:
            return ()
        return (f"{self._unaligned:,} collectives were not compared: the clocks of their ranks were not known yet.",)

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
        """Of ranks whose clocks are not known nothing can be said, unless their devices have timed it."""
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
            self._add_to_ranks(step)
        self._compared_steps += len(steps)
        return self._stragglers.add(steps)

    def _add_to_ranks(self, step: Step) -> None:
        self._waited_ns += step.wait_ns
        latest = int(step.late_ns.argmax())
        if step.late_ns[latest] >= LEAST_LATE_NS:
            self._late_steps[latest] += 1
            self._late_ns[latest, max(step.phase, _OTHER)] += step.late_ns[latest]

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
