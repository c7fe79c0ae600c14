"""What a collective is for, in Lightning's own terms, read from the frames that called it."""

from lightning_ncclsafe.facts import Collective, Phase, RankFacts
from lightning_ncclsafe.rules.units import metric_words, unit_words
from lightning_ncclsafe.rules.wording import numel

# So many elements fit a bucket or unit of the model by their number alone, whatever line the main thread has come to.
_TELLING = 1024
_METRIC = "a torchmetrics sync (gather_all_tensors)"
_LOGGED = "the reduction of a logged value (self.log with sync_dist=True)"

# Part of the file's path, function ("" for any), operations ("" for any), and what it is for.
_BY_FRAME = (
    ("training_epoch_loop.py", "_broadcast_sigterm_tensor", "broadcast", "Lightning's per-batch SIGTERM broadcast"),
    ("lightning_ncclsafe/", "wait_for_vote", "", "the vote on whether every rank has a next batch"),
    ("", "has_len_all_ranks", "all_reduce", "Lightning's check that no rank's dataloader is empty"),
    ("", "_verify_param_shape_across_processes", "", "DDP's parameter check"),
    ("", "_sync_module_states", "", "DDP's first broadcast of parameters and buffers"),
    ("nn/parallel/distributed.py", "_sync_buffers", "broadcast", "DDP's broadcast of buffers before forward"),
    ("early_stopping.py", "", "", "EarlyStopping's vote on whether to stop"),
    ("model_checkpoint.py", "", "", "ModelCheckpoint's agreement between ranks"),
    ("torchmetrics/", "gather_all_tensors", "", _METRIC),
    ("", "_gather_all_tensors", "", "Lightning's gather of tensors"),
    ("logger_connector/result.py", "", "", _LOGGED),
    ("distributed/fsdp/_state_dict_utils.py", "", "", "FSDP's gathering of the state for a checkpoint"),
    ("distributed/fsdp/_optim_utils.py", "", "", "FSDP's gathering of the optimizer's state for a checkpoint"),
    ("torch/distributed/_state_dict_utils.py", "", "", "the gathering of the state for a checkpoint"),
    ("distributed/checkpoint/", "", "", "torch.distributed.checkpoint's coordination"),
    ("", "clip_grad_norm_", "all_reduce", "the norm of all gradients (clip_grad_norm_)"),
    ("nn/modules/_functions.py", "", "", "SyncBatchNorm's statistics of the batch"),
)
# What says less than the unit of the model that the collective's size belongs to.
_BY_FRAME_IN_GENERAL = (
    ("distributed/fsdp/", "", "", "FSDP's parameter or gradient exchange"),
    ("distributed/tensor/", "", "", "tensor parallelism's exchange of a DTensor"),
)
_Row = tuple[str, str, str, str]


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
    found = _of_stack(facts, op, _BY_FRAME)
    if found == _METRIC:
        return metric_words(facts) or found
    if found == _LOGGED and facts.steps.reducing:
        return f"the reduction of the logged value {facts.steps.reducing!r} (self.log with sync_dist=True)"
    known = found or unit or _of_stack(facts, op, _BY_FRAME_IN_GENERAL)
    return known or (_of_collective(collective, facts) if collective is not None else "")


def _of_stack(facts: RankFacts, op: str, rows: tuple[_Row, ...]) -> str:
    return next(filter(None, (_of_frame(frame.file, frame.function, op, rows) for frame in reversed(facts.stack))), "")


def _of_frame(file: str, function: str, op: str, rows: tuple[_Row, ...]) -> str:
    path = file.replace("\\", "/")
    for part, name, ops, words in rows:
        if part in path and name in ("", function) and (not op or op.startswith(ops)):
            return words
    return ""


def _of_collective(collective: Collective, facts: RankFacts) -> str:
    in_backward = any(
        frame.function in ("_engine_run_backward", "backward") and not frame.user for frame in facts.stack
    ) or any(action.name.endswith(".backward") for action in facts.progress.actions)
    if collective.op.startswith("all_reduce") and in_backward:
        return "DDP's gradient all-reduce"
    if collective.op == "broadcast" and numel(collective) == 1 and facts.progress.phase is Phase.TRAIN:
        between_hooks = not facts.stack and not any("_step" in action.name for action in facts.progress.actions)
        return "probably Lightning's per-batch SIGTERM broadcast" if between_hooks else ""
    return ""
