"""A made-up job whose collectives, phases and late ranks are known, as the ranks would tell of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.summary import STEP_PHASES, StepPhase
from lightning_ncclsafe.timing.windows import CALL, SPAN, UNKNOWN_NS, Clock, GroupMembers, OpTotal, Window

MS = 1_000_000
S = 1_000_000_000
BEGAN_NS = 1_700_000_000 * S

# In which a rank goes through a step; the collective is called at the end of the last.
ORDER = (
    StepPhase.OPTIMIZER,
    StepPhase.HOOKS,
    StepPhase.LOGGING,
    StepPhase.VALIDATION,
    StepPhase.CHECKPOINT,
    StepPhase.OTHER,
    StepPhase.DATA,
    StepPhase.COMPUTE,
)
NUMBER = {phase: STEP_PHASES.index(phase) for phase in StepPhase}


def window(
    rows: Iterable[Sequence[int]] = (),
    *,
    spans: Any = (),
    groups: Sequence[GroupMembers] = (),
    ops: Sequence[str] = ("all_reduce",),
    clocks: Mapping[int, Clock] | None = None,
    **more: Any,
) -> Window:
    """A window of calls ``(rank, group, op, seq, step, size_bytes, created_ns, duration_ns)``."""
    told: dict[str, Any] = {"totals": {}, "lost": {}, "left_out": {}, **more}
    calls = rows if isinstance(rows, np.ndarray) else np.array([tuple(row) for row in rows], dtype=CALL)
    return Window(
        calls=calls,
        spans=np.array(spans if len(spans) else [], dtype=SPAN),
        groups=tuple(groups),
        ops=tuple(ops),
        clocks=dict(clocks or {}),
        **told,
    )


def call(
    rank: int, seq: int, at_ns: int, *, group: int = 0, op: int = 0, size_bytes: int = 4, duration_ns: int = UNKNOWN_NS
) -> tuple[int, ...]:
    """A row of :func:`window`; ten collectives make a step."""
    return (rank, group, op, seq, seq // 10, size_bytes, at_ns, duration_ns)


def known(ranks: Iterable[int], uncertainty_ns: int = 0) -> dict[int, Clock]:
    """Clocks that are rank 0's own."""
    return {rank: Clock(offset_ns=0, uncertainty_ns=uncertainty_ns) for rank in ranks}


def world(ranks: int, *, name: str = "0", backend: str = "gloo") -> GroupMembers:
    """The default group."""
    return GroupMembers(name=name, description="default_pg", ranks=tuple(range(ranks)), backend=backend)


def matched(
    arrival_ns: Any,
    *,
    duration_ns: Any = None,
    uncertainty_ns: Sequence[int] | None = None,
    before_ns: Sequence[int] | None = None,
    follows: Sequence[bool] | None = None,
    step: Sequence[int] | None = None,
    group: GroupMembers | None = None,
    size_bytes: int = 4,
) -> MatchedCalls:
    """Matched calls of all ranks, from milliseconds after the beginning."""
    arrival = BEGAN_NS + (np.array(arrival_ns, dtype=float) * MS).astype(np.int64)
    ranks, count = arrival.shape
    known_ns = np.full(arrival.shape, UNKNOWN_NS) if duration_ns is None else np.array(duration_ns) * MS
    before = np.zeros(ranks) if before_ns is None else np.array(before_ns)
    return MatchedCalls(
        group=group or world(ranks),
        ops=("all_reduce",),
        op=np.zeros(count, dtype=np.int64),
        seq=np.arange(count),
        step=np.array(step if step is not None else range(count)),
        size_bytes=np.full(count, size_bytes),
        arrival_ns=arrival,
        duration_ns=known_ns.astype(np.int64),
        uncertainty_ns=np.array(uncertainty_ns if uncertainty_ns is not None else [0] * ranks, dtype=np.int64),
        before_ns=BEGAN_NS + (before * MS).astype(np.int64),
        follows=np.array(follows if follows is not None else [before_ns is not None, *[True] * (count - 1)]),
    )


@dataclass
class Job:
    """Steps of all ranks, each with some collectives for which all of them wait.

    Attributes:
        ranks: Number of ranks.
        steps: Number of steps.
        step_ms: How long each rank works in a step.
        buckets: Collectives in a step, a tenth of a millisecond apart; nobody waits between them.
        waits_in: The phase in which a rank waits for the others, at the end of each step.
        jitter_ms: How much longer each rank works, shape (ranks, steps).
        late: By rank and step, in which phase it is late and by how many milliseconds.
        is_timed: Whether the device gives durations.
        transfer_ms: What a collective takes.
        clock_ahead_ns: How much each rank's clock is ahead of rank 0's.
        uncertainty_ns: By how much that may be wrong.
    """

    ranks: int
    steps: int
    step_ms: float = 50.0
    buckets: int = 1
    waits_in: StepPhase = StepPhase.COMPUTE
    jitter_ms: Any = 0.0
    late: dict[tuple[int, int], tuple[StepPhase, float]] = field(default_factory=dict)
    is_timed: bool = False
    transfer_ms: float = 0.5
    clock_ahead_ns: Mapping[int, int] = field(default_factory=dict)
    uncertainty_ns: int = 0

    def __post_init__(self) -> None:
        share_ms = self.step_ms / len(ORDER)
        work_ms = np.full((self.ranks, self.steps, len(ORDER)), share_ms)
        work_ms[:, :, -1] += np.broadcast_to(self.jitter_ms, (self.ranks, self.steps))
        for (rank, step), (phase, late_ms) in self.late.items():
            work_ms[rank, step, ORDER.index(phase)] += late_ms
        work_ns = (work_ms * MS).astype(np.int64)
        arrives_ns = work_ns.sum(axis=2)
        # All begin the next step together.
        takes_ns = arrives_ns.max(axis=0) + self._after_first_ns(self.buckets) + int(self.transfer_ms * MS)
        self.begins_ns = BEGAN_NS + np.concatenate([[0], np.cumsum(takes_ns)])
        self.arrival_ns = self.begins_ns[:-1] + arrives_ns
        self.work_ns = work_ns

    def _after_first_ns(self, bucket: int) -> int:
        return bucket * MS // 10

    def window(self, first: int = 0, last: int | None = None, *, ranks: Iterable[int] | None = None) -> Window:
        """What ranks tell of the steps from ``first`` on, before ``last``."""
        steps = np.arange(first, self.steps if last is None else min(last, self.steps))
        chosen = [*range(self.ranks)] if ranks is None else [*ranks]
        return window(
            np.concatenate([self._calls(rank, steps) for rank in chosen]),
            spans=np.concatenate([self._spans(rank, steps) for rank in chosen]),
            groups=[world(self.ranks, backend="nccl" if self.is_timed else "gloo")],
            clocks={
                rank: Clock(offset_ns=self.clock_ahead_ns.get(rank, 0), uncertainty_ns=self.uncertainty_ns)
                for rank in chosen
            },
            totals={
                rank: (OpTotal(group="0", op="all_reduce", count=len(steps) * self.buckets, size_bytes=len(steps)),)
                for rank in chosen
            },
        )

    def windows(self, every: int = 50) -> Iterable[Window]:
        """All of it, bit by bit."""
        return (self.window(first, first + every) for first in range(0, self.steps, every))

    def _calls(self, rank: int, steps: Any) -> Any:
        rows = np.zeros((len(steps), self.buckets), dtype=CALL)
        rows["rank"], rows["size_bytes"] = rank, 1_000_000
        rows["step"] = steps[:, None]
        rows["seq"] = steps[:, None] * self.buckets + np.arange(self.buckets)
        after_ns = self._after_first_ns(1) * np.arange(self.buckets)
        rows["created_ns"] = self.arrival_ns[rank, steps][:, None] + after_ns + self.clock_ahead_ns.get(rank, 0)
        # On the device those of a group run one after the other, so who has waited for one is in time for the next.
        wait_ns = np.zeros(rows.shape, dtype=np.int64)
        wait_ns[:, 0] = self.arrival_ns[:, steps].max(axis=0) - self.arrival_ns[rank, steps]
        rows["duration_ns"] = wait_ns + int(self.transfer_ms * MS) if self.is_timed else UNKNOWN_NS
        return rows.reshape(-1)

    def _spans(self, rank: int, steps: Any) -> Any:
        spans = np.zeros((len(steps), len(ORDER) + 1), dtype=SPAN)
        spans["rank"] = rank
        spans["phase"] = [*(NUMBER[phase] for phase in ORDER), NUMBER[self.waits_in]]
        ends_ns = self.begins_ns[steps][:, None] + np.cumsum(self.work_ns[rank, steps], axis=1)
        begins_ns = np.concatenate([self.begins_ns[steps][:, None], ends_ns], axis=1)
        # It calls the collective while it is still computing, and then waits for it.
        begins_ns[:, -1] += self._after_first_ns(self.buckets)
        spans["begin_ns"] = begins_ns + self.clock_ahead_ns.get(rank, 0)
        return spans.reshape(-1)
