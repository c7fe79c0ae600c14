"""The purpose of a collective: the part of the model that has its size, or what the calling frames show."""

import re
from enum import Enum
from functools import lru_cache

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.libraries import Code
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import Collective, Frame, ModelUnit, Phase, RankFacts, UnitKind, group_and_backend
from lightning_ncclsafe.facts.wording import elements, numel, size_words
from lightning_ncclsafe.rules.kit.activity import is_in_action, open_collectives
from lightning_ncclsafe.rules.kit.frames import below_user, deepest_user_frame, is_in

_LISTED = 4
# "model.layers.4" of "model.layers.4.attention.wq": the blocks of a model are numbered.
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")


class _Part(str, Enum):
    """A part of a step, as the end of a sentence."""

    FORWARD = ", in forward"
    BACKWARD = ", in backward"
    OPTIMIZER = ", in the optimizer's step"
    CHECKPOINT = ", for a checkpoint"
    UNKNOWN = ""


# The deepest known frame decides.
_PARTS = (
    (libraries.STATE_GATHERING, _Part.CHECKPOINT),
    (libraries.BACKWARD, _Part.BACKWARD),
    (libraries.FSDP_BACKWARD, _Part.BACKWARD),
    (libraries.FSDP_FORWARD, _Part.FORWARD),
)
_PARTS_BY_ACTION = (
    ("save_checkpoint", _Part.CHECKPOINT),
    (".backward", _Part.BACKWARD),
    (".optimizer_step", _Part.OPTIMIZER),
    ("_step", _Part.FORWARD),
)


def matches(unit: ModelUnit, call: Collective) -> bool:
    """Whether this collective may send this unit."""
    if unit.kind is UnitKind.METRIC:
        return True
    if unit.groups and group_and_backend(call.group)[0] not in unit.groups:
        return False
    gives, takes = elements(call.input_sizes), elements(call.output_sizes)
    if _gathers(call):
        shards = unit.shard_elements
        # Gloo may record only one of a list of outputs.
        return shards > 0 and (takes == unit.elements if takes > gives else gives == shards)
    if call.op.startswith(("reduce_scatter", "_reduce_scatter")):
        return unit.shard_elements > 0 and gives == unit.elements
    # Gloo reduces and scatters by all_reduce; hybrid sharding reduces the shards between its replicas.
    return call.op.startswith("all") and "reduce" in call.op and gives > 0 and gives in _reduced(unit)


def _reduced(unit: ModelUnit) -> tuple[int, ...]:
    return (unit.elements, unit.shard_elements) if unit.kind is UnitKind.FSDP_UNIT else (unit.elements,)


def _gathers(call: Collective) -> bool:
    return "all_gather" in call.op or "allgather" in call.op


def unit_words(call: Collective, facts: RankFacts) -> str:
    """``"the all-gather of FSDP unit layers.3, in forward"``; empty if no unit of the model has this size."""
    part = _part(call, facts)
    unit = unit_of(call, facts, part)
    if unit is None:
        return ""
    if _gathers(call):
        return f"the all-gather of {_named(unit)}{part.value}"
    owner = "DDP's gradient all-reduce of" if unit.kind is UnitKind.DDP_BUCKET else "the reduction of the gradients of"
    return f"{owner} {_named(unit)}{_Part.BACKWARD.value}"


def begins_another_forward(call: Collective | None, facts: RankFacts) -> bool:
    """Whether this gathers the root FSDP unit, as every forward pass does first; not for the very first pass."""
    if call is None or not _gathers(call) or (facts.progress.batch_idx <= 0 and facts.progress.epoch == 0):
        return False
    part = _part(call, facts)
    unit = unit_of(call, facts, part)
    return unit is not None and unit.is_root and part in (_Part.FORWARD, _Part.UNKNOWN)


def unit_of(call: Collective, facts: RankFacts, part: _Part = _Part.UNKNOWN) -> ModelUnit | None:
    """The unit of the model that this collective sends; None if no size or several units fit.

    A collective that the user's code calls itself sends no unit, whatever its size. DTensor's calls look like the
    user's.
    """
    fitting = [unit for unit in facts.units if unit.kind is not UnitKind.METRIC and matches(unit, call)]
    if call.stack and call.stack[-1].user:
        is_of_tensor = is_in(libraries.DTENSOR, facts.stack)
        fitting = [unit for unit in fitting if unit.kind is UnitKind.PARAMETER and is_of_tensor]
    # A state is gathered parameter by parameter; a step sends units, which may have a single parameter.
    wanted = [unit for unit in fitting if (unit.kind is UnitKind.PARAMETER) is (part is _Part.CHECKPOINT)] or fitting
    return wanted[0] if len(wanted) == 1 else None


def _metric_words(facts: RankFacts) -> str:
    """``"torchmetrics' sync of MulticlassAccuracy (val_acc)"``; empty unless one metric is being synchronised."""
    metrics = [unit for unit in facts.units if unit.kind is UnitKind.METRIC]
    if len(metrics) != 1 or metrics[0].alike > 1:
        return ""
    return f"torchmetrics' sync of {metrics[0].type} ({metrics[0].name})"


def _part(call: Collective, facts: RankFacts) -> _Part:
    """The part of the step that the stack is in; unknown if earlier lines may have called this collective."""
    if call.backend.startswith("nccl") and len([*open_collectives(facts)]) > 1:
        return _Part.UNKNOWN
    for frame in reversed(facts.stack):
        if (part := _part_of(frame.file, frame.function)) is not None:
            return part
    names = (action.name for action in reversed(facts.progress.actions))
    return next((part for name in names for ending, part in _PARTS_BY_ACTION if name.endswith(ending)), _Part.UNKNOWN)


@lru_cache(maxsize=16_384)
def _part_of(file: str, function: str) -> _Part | None:
    return next((part for code, part in _PARTS if code.has(file, function)), None)


def _named(unit: ModelUnit) -> str:
    if unit.alike > 1:
        return f"one of {unit.alike} {_KINDS[unit.kind]}s of this size ({_plain(unit.name)} … {_plain(unit.last)})"
    if unit.kind is UnitKind.DDP_BUCKET:
        which = "its only bucket" if unit.name == "1 of 1" else f"bucket {unit.name}"
        return f"{which} ({_contents(unit)}, {size_words(unit.size_bytes)})"
    if unit.is_root:
        return f"the root FSDP unit ({_contents(unit)})"
    return f"{_KINDS[unit.kind]} {_plain(unit.name)}"


_KINDS = {UnitKind.DDP_BUCKET: "bucket", UnitKind.FSDP_UNIT: "FSDP unit", UnitKind.PARAMETER: "parameter"}


def _plain(name: str) -> str:
    return name or "of the whole model"


def _contents(unit: ModelUnit) -> str:
    """The modules that own these parameters: all of them if they are few, else the first and the last."""
    modules = list(dict.fromkeys(_module(name) for name in unit.parameters))
    if len(unit.parameters) == unit.parameter_count and len(modules) <= _LISTED:
        return ", ".join(modules)
    return f"{modules[0]} … {modules[-1]}" if len(modules) > 1 else modules[0]


def _module(parameter: str) -> str:
    block = _BLOCK.match(parameter)
    return block.group() if block else parameter.rpartition(".")[0] or parameter


# A size of this many elements identifies a bucket or unit of the model, whatever line the main thread is at.
_LARGE = 1024
_METRIC = "a torchmetrics sync (gather_all_tensors)"
_LOGGED = "the reduction of a logged value (self.log with sync_dist=True)"

# The calling code, the operation ("" for any), and the purpose.
_BY_CODE = (
    (libraries.SIGTERM_BROADCAST, "broadcast", "Lightning's per-batch SIGTERM broadcast"),
    (libraries.LENGTH_CHECK, "all_reduce", "Lightning's check that no rank's dataloader is empty"),
    (libraries.DDP_PARAMETERS_CHECK, "", "DDP's parameter check"),
    (libraries.DDP_FIRST_BROADCAST, "", "DDP's first broadcast of parameters and buffers"),
    (libraries.DDP_BUFFERS, "broadcast", "DDP's broadcast of buffers before forward"),
    (libraries.EARLY_STOPPING, "", "EarlyStopping's vote on whether to stop"),
    (libraries.MODEL_CHECKPOINT, "", "ModelCheckpoint's agreement between ranks"),
    (libraries.METRIC_GATHER, "", _METRIC),
    (libraries.TENSOR_GATHER, "", "Lightning's gather of tensors"),
    (libraries.LOGGED_VALUES, "", _LOGGED),
    (libraries.FSDP_STATE, "", "FSDP's gathering of the state for a checkpoint"),
    (libraries.FSDP_OPTIMIZER_STATE, "", "FSDP's gathering of the optimizer's state for a checkpoint"),
    (libraries.GATHERED_STATE, "", "the gathering of the state for a checkpoint"),
    (libraries.SHARDED_CHECKPOINT, "", "torch.distributed.checkpoint's coordination"),
    (libraries.GRADIENT_NORM, "all_reduce", "the norm of all gradients (clip_grad_norm_)"),
    (libraries.SYNC_BATCH_NORM, "", "SyncBatchNorm's statistics of the batch"),
)
# Less specific than the unit of the model that has the collective's size.
_BY_GENERAL_CODE = (
    (libraries.FSDP, "", "FSDP's parameter or gradient exchange"),
    (libraries.DTENSOR, "", "tensor parallelism's exchange of a DTensor"),
)
_BY_MARK = {Mark.VOTE.value: "the vote on whether every rank has a next batch"}
_Row = tuple[Code, str, str]


def purpose_words(collective: Collective | None, facts: RankFacts) -> str:
    """The purpose of what this rank waits in; empty if unknown.

    The stack shows the rank's present call, so the answer holds for the collective it is in, not for older ones.
    """
    actions = facts.progress.actions
    if actions and actions[-1].name.startswith("barrier:"):
        name = actions[-1].name.removeprefix("barrier:")
        return f"Lightning's barrier {name!r}" if name else "a barrier of Lightning's"
    op = collective.op if collective is not None else ""
    unit = unit_words(collective, facts) if collective is not None else ""
    if unit and collective is not None and numel(collective) >= _LARGE:
        return unit
    found = _of_stack(() if _is_users_call(facts.stack) else facts.stack, op, _BY_CODE)
    if found == _METRIC:
        return _metric_words(facts) or found
    if found == _LOGGED and facts.steps.reducing:
        return f"the reduction of the logged value {facts.steps.reducing!r} (self.log with sync_dist=True)"
    known = found or unit or _of_stack(facts.stack, op, _BY_GENERAL_CODE)
    return known or (_of_collective(collective, facts) if collective is not None else "")


def _is_users_call(stack: tuple[Frame, ...]) -> bool:
    """Whether the user's code calls torch.distributed itself, perhaps where a library has called the user's code."""
    below = below_user(stack) if deepest_user_frame(stack) is not None else ()
    return bool(below) and all(libraries.CALLS_OF_C10D.has(frame.file, frame.function) for frame in below)


def _of_stack(stack: tuple[Frame, ...], op: str, rows: tuple[_Row, ...]) -> str:
    return next(filter(None, (_of_frame(frame, op, rows) for frame in reversed(stack))), "")


def _of_frame(frame: Frame, op: str, rows: tuple[_Row, ...]) -> str:
    if frame.mark:
        return _BY_MARK.get(frame.mark, "")
    known = _meanings(rows, frame.file, frame.function)
    return next((words for ops, words in known if not op or op.startswith(ops)), "")


@lru_cache(maxsize=16_384)
def _meanings(rows: tuple[_Row, ...], file: str, function: str) -> tuple[tuple[str, str], ...]:
    return tuple((ops, words) for code, ops, words in rows if code.has(file, function))


def _of_collective(collective: Collective, facts: RankFacts) -> str:
    in_backward = is_in(libraries.BACKWARD, facts.stack)
    in_backward = in_backward or is_in_action(facts.progress, ".backward")
    if collective.op.startswith("all_reduce") and in_backward:
        return "DDP's gradient all-reduce"
    if collective.op == "broadcast" and numel(collective) == 1 and facts.progress.phase is Phase.TRAIN:
        between_hooks = not facts.stack and not any("_step" in action.name for action in facts.progress.actions)
        return "probably Lightning's per-batch SIGTERM broadcast" if between_hooks else ""
    return ""
