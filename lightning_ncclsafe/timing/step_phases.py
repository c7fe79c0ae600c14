"""What part of a step an action of Lightning's belongs to."""

import re
from enum import Enum


class StepPhase(str, Enum):
    """Where a rank spends its time between two collectives, in the words of reports."""

    OTHER = "between hooks"
    DATA = "data loading"
    COMPUTE = "forward/backward"
    OPTIMIZER = "the optimizer"
    VALIDATION = "validation"
    CHECKPOINT = "a checkpoint"
    LOGGING = "logging"
    HOOKS = "hooks and callbacks"


STEP_PHASES = tuple(StepPhase)
"""By the number that stands for each in a window's spans."""

LOG_METRICS = "log_metrics"
"""Name of the action in which Lightning hands metrics to its loggers; its profiler has none for it."""

# The first that is found in an action's name decides.
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
    """The phase of an action, by the name that Lightning gives its profiler; of no action, what is between hooks."""
    # The state of a callback names what it monitors: "[Callback]EarlyStopping{'monitor': 'val_loss'}.on_train_end".
    name = re.sub(r"\{.*\}", "", action)
    for phase, marks in _MARKS:
        if any(mark in name for mark in marks):
            return phase
    return StepPhase.OTHER
