"""The result of timing collectives, for the table, the scalars and the reports: phases, bandwidths, totals of ranks."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.timing.windows import Clock


class StepPhase(str, Enum):
    """What a rank does between two collectives, in the words of reports."""

    OTHER = "between hooks"
    DATA = "data loading"
    COMPUTE = "forward/backward"
    OPTIMIZER = "the optimizer"
    VALIDATION = "validation"
    CHECKPOINT = "a checkpoint"
    LOGGING = "logging"
    HOOKS = "hooks and callbacks"


STEP_PHASES = tuple(StepPhase)
"""By their numbers in a window's spans."""

LOG_METRICS = "log_metrics"
"""Name of the action in which metrics go to the loggers; Lightning's profiler has no name for it."""

# The first one found in an action's name decides.
_MARKS = (
    (StepPhase.CHECKPOINT, ("save_checkpoint", "[Callback]ModelCheckpoint", "OnExceptionCheckpoint")),
    (StepPhase.VALIDATION, ("validation", "[_EvaluationLoop]", "val_dataloader", ".test_", "on_test_", "predict")),
    (StepPhase.DATA, ("_dataloader_next", "batch_to_device", "batch_transfer", ".train_dataloader")),
    (StepPhase.LOGGING, (LOG_METRICS,)),
    (StepPhase.HOOKS, (".on_",)),
    (StepPhase.COMPUTE, (".training_step", ".backward", ".configure_sharded_model")),
    (StepPhase.OPTIMIZER, ("optimizer_step", "zero_grad", "gradient_clipping", "lr_scheduler_step")),
)


def step_phase(action: str) -> StepPhase:
    """The phase of an action, by its name for Lightning's profiler; without an action, the time between hooks."""
    # The state of a callback names what it monitors: "[Callback]EarlyStopping{'monitor': 'val_loss'}.on_train_end".
    name = re.sub(r"\{.*\}", "", action)
    for phase, marks in _MARKS:
        if any(mark in name for mark in marks):
            return phase
    return StepPhase.OTHER


_Factor = Callable[[int], float]


class Bandwidth(NamedTuple):
    """Bytes a second."""

    algorithm: float
    bus: float


# As nccl-tests defines them (its doc/PERFORMANCE.md), by the name that back ends give the operation: how often the
# input of one rank is the size that counts, and the factor of the bus bandwidth, for n ranks.
_DEFINITIONS: dict[str, tuple[_Factor, _Factor]] = {
    "all_reduce": (lambda n: 1, lambda n: 2 * (n - 1) / n),
    "all_gather": (lambda n: n, lambda n: (n - 1) / n),
    "reduce_scatter": (lambda n: 1, lambda n: (n - 1) / n),
    "all_to_all": (lambda n: 1, lambda n: (n - 1) / n),
    "broadcast": (lambda n: 1, lambda n: 1),
    "reduce": (lambda n: 1, lambda n: 1),
    "send": (lambda n: 1, lambda n: 1),
    "recv": (lambda n: 1, lambda n: 1),
    "gather": (lambda n: n, lambda n: (n - 1) / n),
    "scatter": (lambda n: n, lambda n: (n - 1) / n),
}

# Names of one and the same operation, without a leading underscore.
_SAME = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "all_gather_base": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allgather_coalesced": "all_gather",
    "reduce_scatter_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall_single": "all_to_all",
}


def bandwidth(op: str, *, ranks: int, size_bytes: float, seconds: float) -> Bandwidth | None:
    """Algorithm and bus bandwidth of an operation.

    Args:
        op: The operation by PyTorch's name for it, e.g. ``"all_reduce"`` or ``"_all_gather_base"``.
        size_bytes: Bytes that one rank puts in.
        seconds: Time that it takes once all ranks have arrived.

    Returns:
        None for an operation without a definition, or without a time.
    """
    definition = _DEFINITIONS.get(plain_op(op))
    if definition is None or seconds <= 0 or ranks < 1:
        return None
    size_factor, bus_factor = definition
    algorithm = size_bytes * size_factor(ranks) / seconds
    return Bandwidth(algorithm, algorithm * bus_factor(ranks))


def plain_op(op: str) -> str:
    """One name for an operation, whichever of its names a back end has recorded: "send 0->1" is a send."""
    name = op.strip().lower().lstrip("_").split(" ")[0]
    return _SAME.get(name, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSummary:
    """One operation on one process group.

    Attributes:
        group: Name of the group.
        description: Its purpose.
        backend: ``"nccl"``, ``"gloo"``, …
        op: The operation.
        ranks: Number of the group's members.
        count: Calls of one rank, the most that any rank has made.
        size_bytes: Bytes of one call on one rank, on average.
        compared: Calls whose times were compared among all members.
        skew_s: Seconds between the first rank's arrival and the last one's, on average over the compared calls.
        wait_s: Seconds that a rank waited for the others in a call, on average over calls and ranks.
        transfer_s: Seconds of the shortest duration among the ranks, on average: the time of a call once all have
            arrived. None if the back end records no durations.
        bus_bandwidth: Bytes a second that each link carries, by nccl-tests' definition; None without durations, and
            for operations for which it defines none.
    """

    group: str
    description: str = ""
    backend: str = ""
    op: str
    ranks: int
    count: int = 0
    size_bytes: float = 0.0
    compared: int = 0
    skew_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float | None = None
    bus_bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """How long one rank kept the others waiting.

    Attributes:
        steps: Steps in which it was compared with the others.
        late_steps: Steps in which it was last, by more than clock errors and noise explain.
        late_s: Seconds, in all, for which others waited for it in those steps.
        waited_s: Seconds, in all, that it waited for others.
        by_phase_s: ``late_s`` by the phase in which it fell behind.
        clock: Its clock against rank 0's.
    """

    rank: int
    steps: int = 0
    late_steps: int = 0
    late_s: float = 0.0
    waited_s: float = 0.0
    by_phase_s: dict[StepPhase, float] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSummary:
    """The results of a run.

    Attributes:
        began_ns: Wall-clock time of rank 0 at the first compared collective, nanoseconds since the epoch; 0 if none.
        ended_ns: The same of the last one.
        steps: Steps that were compared.
        ops: By group and operation, those on which ranks waited longest first.
        ranks: By rank, ascending.
        stragglers: Ranks that were named, in that order.
        lost: Calls that the recorder overwrote before they were read, all ranks.
        left_out: Calls that were read and counted but not compared, all ranks.
        unmatched: Calls that not all members of the group made or reported.
        missing: What could not be recorded, one sentence each.
    """

    began_ns: int = 0
    ended_ns: int = 0
    steps: int = 0
    ops: tuple[OpSummary, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    lost: int = 0
    left_out: int = 0
    unmatched: int = 0
    missing: tuple[str, ...] = ()
