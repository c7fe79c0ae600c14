"""A Lightning Trainer's counters and settings, read from the memory of its process."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lightning_ncclsafe.code.libraries import FITTING, SETUP_OF_LOADERS, SIGTERM_BROADCAST, TRAINING_LOOPS
from lightning_ncclsafe.facts import LoopEnd, Phase, Progress, TrainerFacts
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.inspecting.objects import Interpreter

_SETTINGS = {
    "max_epochs": ("fit_loop", "max_epochs"),
    "max_steps": ("fit_loop", "epoch_loop", "max_steps"),
    **{
        name: (name,)
        for name in (
            "limit_train_batches",
            "limit_val_batches",
            "accumulate_grad_batches",
            "val_check_interval",
            "check_val_every_n_epoch",
            "num_sanity_val_steps",
            "gradient_clip_val",
        )
    },
}
_EPOCH_LOOP = ("fit_loop", "epoch_loop")
_TRAINING = (*_EPOCH_LOOP, "batch_progress")
_VALIDATION = (*_EPOCH_LOOP, "val_loop", "batch_progress")
_STEPS = (
    (*_EPOCH_LOOP, "automatic_optimization", "optim_progress", "optimizer", "step", "total", "completed"),
    (*_EPOCH_LOOP, "manual_optimization", "optim_step_progress", "total", "completed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCounters:
    """What the Trainer's ``fit`` has counted.

    Attributes:
        epoch: Current epoch, from 0.
        global_step: Optimizer steps taken.
        batch_idx: Index of the batch, in training and in its validation; -1 before the first.
        is_last: Whether that batch is the last one of the data, in training and in its validation.
        trainer: Its settings, and the reason for which its loop would end.
    """

    epoch: int
    global_step: int
    batch_idx: tuple[int, int]
    is_last: tuple[bool, bool]
    trainer: TrainerFacts

    def within(self, progress: Progress) -> Progress:
        """The same progress, with these counts."""
        if progress.phase in (Phase.UNKNOWN, Phase.FINISHED):
            return progress
        loop = int(progress.phase in (Phase.VALIDATE, Phase.SANITY_CHECK))
        return replace(
            progress,
            epoch=self.epoch,
            global_step=self.global_step,
            batch_idx=self.batch_idx[loop],
            is_last_batch=self.is_last[loop],
        )


def counters_of(interpreter: Interpreter, stack: Sequence[SeenFrame]) -> TrainerCounters | None:
    """The counters of the Trainer that a stack is in; None if it is not in ``fit``, or if they cannot be read.

    Args:
        interpreter: Of the process.
        stack: Of its main thread.
    """
    trainer = next((frame.addresses.get("self", 0) for frame in stack if FITTING.has(frame.file, frame.function)), 0)
    with suppress(LookupError, OSError, ValueError):
        # Lightning counts a batch only after the ranks have exchanged a signal before it.
        is_next = any(SIGTERM_BROADCAST.has(frame.file, frame.function) for frame in stack)
        # It resets the counters only once it has the loader of a new epoch.
        is_new = any(_makes_loader(frame) for frame in stack)
        return _counted(interpreter, trainer, is_next=is_next, is_new=is_new) if trainer else None
    return None


def _makes_loader(frame: SeenFrame) -> bool:
    return all(code.has(frame.file, frame.function) for code in (SETUP_OF_LOADERS, TRAINING_LOOPS))


def _counted(interpreter: Interpreter, trainer: int, *, is_next: bool, is_new: bool) -> TrainerCounters:
    def number(*names: str) -> int:
        found = interpreter.value(trainer, *names)
        if not isinstance(found, int):
            raise LookupError(names[-1])
        return found

    def some(*names: str) -> int:
        with suppress(LookupError):
            return number(*names)
        return 0

    ready, last = number(*_TRAINING, "current", "ready"), bool(some(*_TRAINING, "is_last_batch"))
    if is_new:
        ready, last = 0, False
    validated, last_validated = some(*_VALIDATION, "current", "ready"), bool(some(*_VALIDATION, "is_last_batch"))
    steps = max(some(*names) for names in _STEPS)
    settings = {}
    for name, names in _SETTINGS.items():
        with suppress(LookupError):
            settings[name] = str(interpreter.value(trainer, *names))
    return TrainerCounters(
        epoch=number("fit_loop", "epoch_progress", "current", "completed"),
        global_step=steps,
        batch_idx=(ready - 1 + is_next, validated - 1),
        is_last=(last and not is_next, last_validated),
        trainer=TrainerFacts(
            settings=settings,
            callbacks=interpreter.kinds(trainer, "callbacks"),
            validates_by_clock=_validates_by_clock(interpreter, trainer),
            end=_end(interpreter, trainer, ready, last, steps),
            batches_begun=ready,
            batches=some("fit_loop", "max_batches") or None,
            validated=some(*_VALIDATION, "current", "completed"),
        ),
    )


def _end(interpreter: Interpreter, trainer: int, ready: int, is_last: bool, steps: int) -> LoopEnd:
    """The same as `TrainerProbe` finds on its own rank."""
    if interpreter.value(trainer, "should_stop"):
        return LoopEnd.SHOULD_STOP
    count = interpreter.value(trainer, "fit_loop", "max_batches")
    if not ready or (ready >= count if isinstance(count, int) else is_last):
        return LoopEnd.DATA
    most = interpreter.value(trainer, *_SETTINGS["max_steps"])
    if isinstance(most, int) and -1 != most <= steps:
        return LoopEnd.MAX_STEPS
    others = {interpreter.value(trainer, *_TRAINING, "current", name) for name in ("started", "completed")}
    return LoopEnd.DATA if others == {ready} else LoopEnd.UNKNOWN


def _validates_by_clock(interpreter: Interpreter, trainer: int) -> bool:
    with suppress(LookupError):
        return interpreter.value(trainer, "_val_check_time_interval") is not None
    return False
