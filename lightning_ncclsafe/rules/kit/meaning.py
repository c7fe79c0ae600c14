"""What a collective is for, in Lightning's own terms, read from the frames that called it."""

from functools import lru_cache

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.libraries import Code
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import Collective, Frame, Phase, RankFacts
from lightning_ncclsafe.rules.kit.units import metric_words, unit_words
from lightning_ncclsafe.rules.kit.wording import numel

# So many elements fit a bucket or unit of the model by their number alone, whatever line the main thread has come to.
_TELLING = 1024
_METRIC = "a torchmetrics sync (gather_all_tensors)"
_LOGGED = "the reduction of a logged value (self.log with sync_dist=True)"

# The code that calls it, operations ("" for any), and what it is for.
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
# What says less than the unit of the model that the collective's size belongs to.
_BY_CODE_IN_GENERAL = (
    (libraries.FSDP, "", "FSDP's parameter or gradient exchange"),
    (libraries.DTENSOR, "", "tensor parallelism's exchange of a DTensor"),
)
_BY_MARK = {Mark.VOTE.value: "the vote on whether every rank has a next batch"}
_Row = tuple[Code, str, str]


def meaning(collective: Collective | None, facts: RankFacts) -> str:
    """Lightning's own meaning of what this rank waits in; empty where unknown.

    The stack belongs to the rank's present moment, so the answer holds for the collective it is in, not for older ones.
    """
    actions = facts.progress.actions
    if actions and actions[-1].name.startswith("barrier:"):
        return f"Lightning's barrier {actions[-1].name.removeprefix('barrier:')!r}"
    op = collective.op if collective is not None else ""
    unit = unit_words(collective, facts) if collective is not None else ""
    if unit and collective is not None and numel(collective) >= _TELLING:
        return unit
    found = _of_stack(facts, op, _BY_CODE)
    if found == _METRIC:
        return metric_words(facts) or found
    if found == _LOGGED and facts.steps.reducing:
        return f"the reduction of the logged value {facts.steps.reducing!r} (self.log with sync_dist=True)"
    known = found or unit or _of_stack(facts, op, _BY_CODE_IN_GENERAL)
    return known or (_of_collective(collective, facts) if collective is not None else "")


def _of_stack(facts: RankFacts, op: str, rows: tuple[_Row, ...]) -> str:
    return next(filter(None, (_of_frame(frame, op, rows) for frame in reversed(facts.stack))), "")


def _of_frame(frame: Frame, op: str, rows: tuple[_Row, ...]) -> str:
    if frame.mark:
        return _BY_MARK.get(frame.mark, "")
    known = _meanings(rows, frame.file, frame.function)
    return next((words for ops, words in known if not op or op.startswith(ops)), "")


@lru_cache(maxsize=16_384)
def _meanings(rows: tuple[_Row, ...], file: str, function: str) -> tuple[tuple[str, str], ...]:
    return tuple((ops, words) for code, ops, words in rows if code.has(file, function))


def _of_collective(collective: Collective, facts: RankFacts) -> str:
    in_backward = any(libraries.BACKWARD.has(frame.file, frame.function) for frame in facts.stack)
    in_backward = in_backward or any(action.name.endswith(".backward") for action in facts.progress.actions)
    if collective.op.startswith("all_reduce") and in_backward:
        return "DDP's gradient all-reduce"
    if collective.op == "broadcast" and numel(collective) == 1 and facts.progress.phase is Phase.TRAIN:
        between_hooks = not facts.stack and not any("_step" in action.name for action in facts.progress.actions)
        return "probably Lightning's per-batch SIGTERM broadcast" if between_hooks else ""
    return ""
