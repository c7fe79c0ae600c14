"""Collectives, their process groups, and the parts of a model that they send."""

from dataclasses import dataclass, field
from enum import Enum

from lightning_ncclsafe.facts.frames import Frame

VOTE_GROUP = "ncclsafe votes"
"""Description of this package's process group, on which ranks vote whether all of them have a next batch, and wait."""
VOTE_AHEAD_GROUP = "ncclsafe votes ahead"
"""The same for votes one batch ahead, which are under way while a rank trains."""
VOTE_GROUPS = (VOTE_GROUP, VOTE_AHEAD_GROUP)
# By the names of torch's ScalarType, which its recorder uses; Float8 and quantized types have one byte.
_ELEMENT_BYTES = (
    dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2)
    | dict.fromkeys(("Int", "UInt32", "Float", "ComplexHalf", "QInt32"), 4)
    | dict.fromkeys(("Long", "UInt64", "Double", "ComplexFloat"), 8)
    | {"ComplexDouble": 16}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective as one rank's Flight Recorder recorded it.

    Attributes:
        group: Name of the process group, unique in the job (``"0"`` is the default group), see :class:`Group`.
        seq: Sequence number within the group, from 1; equal numbers on different ranks should be the same collective.
        op: Operation without the back end's prefix: ``"all_reduce"``, ``"broadcast"``, ``"barrier"``, …
        backend: ``"nccl"``, ``"nccl2"``, ``"gloo"``, …
        completed: Whether the recorder saw it end on this rank.
        started: Whether the recorder saw it start on the device (NCCL only; always false on gloo).
        launching: Whether the host may still be inside the call, so that it has not reached the device.
        gave_up: Whether NCCL's watchdog has abandoned it; then it has not ended.
        input_sizes: Shapes of the inputs.
        output_sizes: Shapes of the outputs.
        dtypes: Data types of the inputs.
        created_ns: Wall-clock time of the call, nanoseconds since the epoch.
        duration_ms: Duration on the device in milliseconds; None if the back end does not report it.
        timeout_ms: Timeout that applies to this collective, in milliseconds; 0 if unknown.
        is_p2p: Whether it is a point-to-point operation, which is numbered separately; operations that were started
            together have one number, and end together.
        pair_number: Of a send or receive in a dump, which one it is between these two ranks of the group, in this
            direction, from 1; None if the ring may have lost earlier ones.
        stack: Where it was called, outermost frame first. For a live rank: the user's line below the Trainer, the line
            under a condition on the rank, and the caller of ``torch.distributed``, with the newest call of each
            ``site``; for dumps and logs, what they contain.
        site: A hash of the whole stack below the Trainer, 12 hexadecimal digits: calls of several ranks with the same
            hash were made at the same place. ``"native:"`` with the operation and its sizes if no Python function made
            the call, as in the backward pass on a GPU. Empty if unknown.
    """

    group: str
    seq: int
    op: str
    backend: str = ""
    completed: bool = False
    started: bool = False
    launching: bool = False
    gave_up: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    created_ns: int = 0
    duration_ms: float | None = None
    timeout_ms: int = 0
    is_p2p: bool = False
    pair_number: int | None = None
    stack: tuple[Frame, ...] = ()
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as one rank sees it; one with several back ends is several groups, as each counts its own calls.

    Attributes:
        name: Name of the group, unique in the job; see :func:`of_backend`.
        description: The group's description (``"default_pg"`` for the default group).
        ranks: Global ranks of the members; empty if unknown.
        last_enqueued: Highest sequence number this rank has called; 0 if none.
        last_started: Highest sequence number that started on the device; -1 if the back end does not report it.
        last_completed: Highest sequence number that completed on this rank; 0 if none.
        is_mixed: Whether it has sends and receives, which PyTorch's own counters include.
    """

    name: str
    description: str = ""
    ranks: tuple[int, ...] = field(default=(), metadata={"ranges": True})
    last_enqueued: int = 0
    last_started: int = -1
    last_completed: int = 0
    is_mixed: bool = False


class NotRecorded(str, Enum):
    """Why nothing is known of the collectives of a group."""

    NO_ENTRY = "no-entry"
    """The recorder of its back end can be read, and has no entry of the group although collectives were called."""
    NO_DUMP = "no-dump"
    """This build of PyTorch has no function that dumps the recorder of its back end."""
    UNKNOWN_BACKEND = "unknown-back-end"
    """It is not known where its back end records, if it does."""
    LOST = "lost"
    """The recorder has entries, and those of the group have been overwritten."""
    DRIVER_SILENT = "driver-silent"
    """CUDA's driver did not answer, and reading the recorder would have stopped all Python code of the rank."""
    OUTSIDE = "outside"
    """The rank was inspected from outside, where its recorder cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedGroup:
    """A process group whose collectives on a rank are unknown; it is not among the rank's groups.

    Attributes:
        name: Name of the group.
        why: Why nothing is known.
        description: The group's description.
        backend: Name of its back end; older reports have all of a group with several, ``"gloo,xccl"``.
        calls: How many collectives the rank has called in it, by the group's own count; -1 where it has none.
    """

    name: str
    why: NotRecorded
    description: str = ""
    backend: str = ""
    calls: int = -1


class UnitKind(str, Enum):
    """Which part of a model is sent in one collective."""

    DDP_BUCKET = "ddp-bucket"
    """Gradients that DistributedDataParallel reduces together."""
    FSDP_UNIT = "fsdp-unit"
    """Parameters that FSDP (a FlatParameter) or FSDP2 (``fully_shard``) gathers, and whose gradients it reduces."""
    PARAMETER = "parameter"
    """One parameter that is sharded over ranks (a DTensor)."""
    METRIC = "metric"
    """A torchmetrics metric that is being synchronised at this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnit:
    """A part of the model that an outstanding collective sends; several of the same size are one.

    Attributes:
        kind: What it is.
        name: Module or parameter as the model names it (empty for the model itself); for a bucket ``"1 of 3"``.
        parameters: Names of its parameters in the order in which they are sent: the first four and the last four.
        parameter_count: How many it has.
        elements: Elements on all ranks together, with padding.
        shard_elements: Elements on one rank, with padding; 0 if every rank has all of them.
        size_bytes: Bytes on all ranks together, in the data type of the parameters.
        groups: Names of the process groups it is sent in; empty where unknown.
        is_root: Whether it is the outermost FSDP unit, which a forward pass gathers first.
        type: Class of a metric; empty for all else.
        alike: How many units of this kind have these very sizes.
        last: Name of the last one of those; empty if there is only one.
    """

    kind: UnitKind
    name: str = ""
    parameters: tuple[str, ...] = ()
    parameter_count: int = 0
    elements: int = 0
    shard_elements: int = 0
    size_bytes: int = 0
    groups: tuple[str, ...] = ()
    is_root: bool = False
    type: str = ""
    alike: int = 1
    last: str = ""


def of_backend(text: str, backend: str) -> str:
    """Name or description of a group for one of its back ends, unless that is its first for a device: ``"0:gloo"``."""
    return f"{text}:{backend}"


def group_and_backend(name: str) -> tuple[str, str]:
    """The process group, and the back end that its name adds: ``("0", "gloo")`` for ``"0:gloo"``, ``("0", "")``."""
    group, _, backend = name.partition(":")
    return group, backend


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a type that torch's recorder names: 4 for ``"Float"``."""
    return _ELEMENT_BYTES.get(dtype, 1)
