"""Reads the progress of a Lightning Trainer from its public state, by duck type; Lightning is not imported here."""

import ast
import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.facts import Action, LoaderFacts, LoopEnd, Phase, Progress, StorageFacts, TrainerFacts
from lightning_ncclsafe.facts.phase_kinds import FIRST_BATCH, PhaseKind, make_phase_kind
from lightning_ncclsafe.probes.data.data_line import data_line
from lightning_ncclsafe.probes.host.resources import filesystem_of
from lightning_ncclsafe.probes.process.stacks import is_user_code, training_thread
from lightning_ncclsafe.probes.process.thread_frames import current_frames
from lightning_ncclsafe.probes.source.scopes import (
    Scope,
    attributes_set,
    first_places,
    function_in,
    scopes_in,
    scopes_of,
)
from lightning_ncclsafe.probes.trainer.logged_keys import users_of
from lightning_ncclsafe.probes.trainer.setting_lines import SET_BY, setting_lines

# Values of Lightning's RunningStage.
_PHASES = {phase.value: phase for phase in (Phase.SANITY_CHECK, Phase.TRAIN, Phase.VALIDATE, Phase.TEST, Phase.PREDICT)}
# Settings that decide how many steps, validations and collectives a rank makes.
_SETTINGS = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "accumulate_grad_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
)
# Those that decide when training ends: setting them during training affects this rank only.
_ENDS = ("max_epochs", "max_steps", "limit_train_batches", "first epoch")
# Settings for the batch after which validation starts; Lightning computes the first from the second.
_VALIDATES = ("val_check_batch", "val_check_interval")
_MOST_DECORATORS = 8
_VALIDATES_AT_ALL = (*_VALIDATES, "check_val_every_n_epoch", "limit_val_batches")


def settings_of(trainer: Any) -> dict[str, str]:
    """The Trainer's settings that decide how many steps, validations and collectives it makes, by name."""
    found = ((name, getattr(trainer, name, None)) for name in _SETTINGS)
    return {name: str(value) for name, value in found if value is not None}


def epoch_is_over(trainer: Any) -> bool:
    """Whether Lightning has counted a training epoch as completed, in ``current_epoch``, and has not begun another."""
    progress = getattr(getattr(trainer, "fit_loop", None), "epoch_progress", None)
    return progress is not None and 0 < progress.current.completed == progress.current.ready


def _mark_loggers(trainer: Any) -> None:
    """Marks the methods of the user's own classes of loggers: frames do not show whose function they are."""
    for logger in getattr(trainer, "loggers", ()):
        for kind in type(logger).__mro__:
            if any(base.__name__ == "Logger" for base in kind.__mro__):
                for function in _own_functions(kind):
                    marked(Mark.USER_LOGGER)(function)


def _own_functions(kind: type) -> Iterator[FunctionType]:
    """The functions that are written in a class of the user's, without their decorators."""
    for member in [*vars(kind).values()]:
        function = function_in(member)
        for _ in range(_MOST_DECORATORS):
            function = vars(function).get("__wrapped__", function) if isinstance(function, FunctionType) else function
        is_own = isinstance(function, FunctionType) and function.__module__ == kind.__module__
        if is_own and is_user_code(function.__code__.co_filename):
            yield function


class TrainerProbe:
    """Reads a Trainer from another thread. It only looks at attributes that cost nothing and touch no storage.

    Attributes:
        finished: Whether the Trainer's function has returned.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        _mark_loggers(trainer)
        self._started = False
        self._processed_before: int | None = None
        self._epochs_before = 0
        self._settings: dict[str, str] = {}
        self.finished = False

    @property
    def started(self) -> bool:
        """Whether all ranks have met before the first batch; until then the phase is ``INIT``."""
        return self._started

    @started.setter
    def started(self, value: bool) -> None:
        self._started = value
        # If training is resumed within an epoch, this many batches precede its first one.
        self._processed_before = self._processed()
        self._epochs_before = self._epochs()
        # Now: a callback may change some of them from epoch to epoch.
        self._settings = self._read_settings()

    def progress(self, actions: tuple[Action, ...], last_action: str, idle_s: float) -> Progress:
        """The progress of the Trainer."""
        batches = self._batches()
        return Progress(
            phase=self._phase(_is_saving(actions)),
            actions=actions,
            last_action=last_action,
            epoch=int(getattr(self._trainer, "current_epoch", 0)),
            batch_idx=self.batch_idx(),
            is_last_batch=bool(getattr(batches, "is_last_batch", False)) and not self._is_between_epochs(),
            global_step=int(getattr(self._trainer, "global_step", 0)),
            idle_s=round(idle_s, 3),
            is_between_epochs=self._is_after_an_epoch(),
        )

    def phase_kind(self, actions: tuple[Action, ...]) -> PhaseKind:
        """What kind of phase the Trainer is in."""
        return make_phase_kind(self._phase(_is_saving(actions)), actions, first=self._is_first())

    def limit_name(self, *, is_saving: bool) -> str:
        """The same as the phase kind's ``limit_name``, but cheaper: it is called in every step."""
        phase = self._phase(is_saving)
        return FIRST_BATCH if phase is Phase.TRAIN and self._is_first() else phase.value

    def batch_idx(self) -> int:
        """Index of the batch being worked on in the current loop, from 0; -1 before the first."""
        batches = self._batches()
        return -1 if batches is None or self._is_between_epochs() else batches.current.ready - 1

    def model(self) -> Any:
        """The model as the strategy has wrapped it; None before it is there."""
        return getattr(getattr(self._trainer, "strategy", None), "model", None)

    def is_on_gpu(self) -> bool:
        """Whether this rank trains on a CUDA device, and so communicates by NCCL."""
        # A property that raises before the strategy knows its devices.
        with suppress(Exception):
            return bool(self._trainer.strategy.root_device.type == "cuda")
        return False

    def loaders(self) -> tuple[LoaderFacts, ...]:
        """The dataloaders of the current loop."""
        loop = self._loop()
        counts = getattr(loop, "max_batches", None)
        # The fit loop has one count for its combined loader, the others one count per loader.
        each = counts if isinstance(counts, list) else itertools.repeat(counts)
        return tuple(_loader_facts(loader, count) for loader, count in zip(_loaders_of(loop), each, strict=False))

    def data_ends_at(self) -> dict[str, str]:
        """For each stage whose loaders exist, the line that decides how many batches they have; a search in source."""
        frame = current_frames().get(training_thread().ident or 0)
        found: dict[str, str] = {}
        for phase, loop in self._loops().items():
            source = getattr(loop, "_data_source", None)
            given, hook = getattr(source, "instance", None), getattr(source, "name", "")
            loaders = _loaders_of(loop)
            if loaders and (line := data_line(given, hook, frame, loaders)):
                found[phase.value] = line
        return found

    def facts(self) -> TrainerFacts | None:
        """Its settings, and how its training loop ended, without lines; None if it does not ``fit``."""
        trainer = self._trainer
        if not self._fits():
            return None
        batches, count = trainer.fit_loop.epoch_loop.batch_progress, _number_of(trainer.fit_loop.max_batches)
        begun = 0 if self._is_between_epochs() else batches.current.ready
        resumed = getattr(trainer, "ckpt_path", None)
        return TrainerFacts(
            settings=self._settings or ({"ckpt_path": str(resumed)} if resumed else {}),
            changed=self._changed(),
            callbacks=tuple(type(callback).__name__ for callback in trainer.callbacks),
            validates_by_clock=self._validation_s() is not None,
            end=_loop_end(trainer),
            batches_begun=begun,
            batches_before=batches.total.ready - begun,
            batches=count,
            validated=trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.completed,
        )

    def ended_at(self, before: TrainerFacts | None) -> tuple[str, ...]:
        """Lines that may have made its training loop end as it did; a search in the user's source, as the next two.

        Args:
            before: Its facts as they were read; if the loop has ended in another way since, no lines are given.
        """
        if before is None or not self._fits():
            return ()
        if (before.end, before.changed) != (_loop_end(self._trainer), self._changed()):
            return ()
        return first_places(_ending_lines(self._trainer, before.end, before.changed))

    def validates_at(self) -> tuple[str, ...]:
        """Lines that set after which batches or epochs validation runs."""
        return first_places(_lines_that_set(self._trainer, _VALIDATES_AT_ALL)) if self._fits() else ()

    def set_at(self) -> dict[str, tuple[str, ...]]:
        """Where each setting may have got its value."""
        return setting_lines(self._trainer, _SETTINGS) if self._fits() else {}

    def _changed(self) -> dict[str, str]:
        """Settings that end the loop and are others now than when it began."""
        now = self._read_settings() if self._settings else {}
        return {name: now.get(name, "None") for name in _ENDS if now.get(name) != self._settings.get(name)}

    def validation_loaders(self) -> list[Any]:
        """The dataloaders of fit's validation, if they exist already."""
        return _loaders_of(self._trainer.fit_loop.epoch_loop.val_loop)

    def directories(self) -> dict[str, str]:
        """The directories of logs and checkpoints, by purpose: ``"logs"``, ``"checkpoints"``."""
        trainer, found = self._trainer, {}
        for logger in getattr(trainer, "loggers", ()):
            if path := getattr(logger, "save_dir", None):
                found["logs"] = str(path)
        for callback in getattr(trainer, "checkpoint_callbacks", ()):
            found["checkpoints"] = str(getattr(callback, "dirpath", None) or trainer.default_root_dir)
        return found

    def storage(self) -> tuple[StorageFacts, ...]:
        """The directories that loggers and checkpoint callbacks write to."""
        loggers = [(logger, getattr(logger, "save_dir", None)) for logger in getattr(self._trainer, "loggers", ())]
        callbacks = getattr(self._trainer, "checkpoint_callbacks", ())
        owners = loggers + [(callback, getattr(callback, "dirpath", None)) for callback in callbacks]
        return tuple(
            StorageFacts(owner=type(owner).__name__, path=str(path), filesystem=filesystem_of(str(path)))
            for owner, path in owners
            if path
        )

    def _fits(self) -> bool:
        return getattr(getattr(self._trainer, "state", None), "fn", None) == "fit"

    def _read_settings(self) -> dict[str, str]:
        trainer = self._trainer
        found: dict[str, Any] = {**settings_of(trainer)}
        if (validation_s := self._validation_s()) is not None:
            found["val_check_interval"] = f"{validation_s:g} s"
        # Values that a callback sets epoch by epoch.
        schedules = (getattr(callback, "scheduling", None) for callback in getattr(trainer, "callbacks", ()))
        for schedule in schedules:
            if isinstance(schedule, dict):
                counts = (f"{count} (from epoch {epoch})" for epoch, count in sorted(schedule.items()))
                found["accumulate_grad_batches"] = ", ".join(counts)
        found |= {"first epoch": self._first_epoch(), "first step": getattr(trainer, "global_step", 0)}
        return {name: str(value) for name, value in found.items() if value is not None}

    def _first_epoch(self) -> int:
        """The number that the first epoch of this call has, or would have if nothing had set the counter since.

        By processed epochs: Lightning counts the completed ones, ``current_epoch``, only after the hooks of their end.
        """
        progress = self._epoch_progress()
        return 0 if progress is None else progress.current.processed - (self._epochs() - self._epochs_before)

    def _epochs(self) -> int:
        """The number of processed training epochs, whatever the current epoch's number is."""
        progress = self._epoch_progress()
        return 0 if progress is None else progress.total.processed

    def _epoch_progress(self) -> Any:
        return getattr(getattr(self._trainer, "fit_loop", None), "epoch_progress", None)

    def _validation_s(self) -> float | None:
        """Lightning's own name: there is no other for a ``val_check_interval`` that is a time (from 2.6 on)."""
        return getattr(self._trainer, "_val_check_time_interval", None)

    def _phase(self, is_saving: bool) -> Phase:
        if self.finished:
            return Phase.FINISHED
        if is_saving:
            return Phase.CHECKPOINT
        stage = getattr(getattr(self._trainer, "state", None), "stage", None)
        return _PHASES.get(getattr(stage, "value", ""), Phase.INIT) if self._started else Phase.INIT

    def _is_first(self) -> bool:
        """Whether the first batch of the current loop is not over: counted when it is, before the hooks at its end."""
        trainer, batches = self._trainer, self._batches()
        if batches is None or batches.current.processed == 0:
            return True
        if not getattr(trainer, "training", False):
            return False
        return bool(batches.total.processed == self._processed_before) or self._is_between_epochs()

    def _is_between_epochs(self) -> bool:
        """Whether a training epoch's first hooks run, before its batches are counted.

        Lightning resets the previous epoch's counts only after these hooks.
        """
        if not getattr(self._trainer, "training", False):
            return False
        epochs = self._trainer.fit_loop.epoch_progress.current
        return bool(epochs.ready > epochs.started)

    def _is_after_an_epoch(self) -> bool:
        # Other calls of the Trainer leave the counts of the last fit as they are.
        return self._function() == "fit" and epoch_is_over(self._trainer)

    def _function(self) -> str:
        """The present or last call of the Trainer: ``"fit"``."""
        return str(getattr(getattr(getattr(self._trainer, "state", None), "fn", None), "value", ""))

    def _processed(self) -> int | None:
        """Training batches of all epochs."""
        epoch_loop = getattr(getattr(self._trainer, "fit_loop", None), "epoch_loop", None)
        progress = getattr(epoch_loop, "batch_progress", None)
        return progress.total.processed if progress is not None else None

    def _loop(self) -> Any:
        trainer = self._trainer
        if getattr(trainer, "training", False):
            return trainer.fit_loop
        return getattr(trainer, "_active_loop", None)

    def _loops(self) -> dict[Phase, Any]:
        """Those of the present or last call of the Trainer, by the phase that their batches are in."""
        trainer = self._trainer
        name = self._function()
        if name == "fit":
            return {Phase.TRAIN: trainer.fit_loop, Phase.VALIDATE: trainer.fit_loop.epoch_loop.val_loop}
        phase = _PHASES.get(name)
        return {phase: getattr(trainer, f"{name}_loop")} if phase is not None else {}

    def _batches(self) -> Any:
        """Lightning's ``BatchProgress`` of the current loop."""
        loop = self._loop()
        return getattr(getattr(loop, "epoch_loop", loop), "batch_progress", None)


def _loop_end(trainer: Any) -> LoopEnd:
    batches, count = trainer.fit_loop.epoch_loop.batch_progress, _number_of(trainer.fit_loop.max_batches)
    if trainer.should_stop:
        return LoopEnd.SHOULD_STOP
    current = batches.current
    # Lightning also calls that one the last at which on_train_batch_start has returned -1.
    if not current.ready or (batches.is_last_batch if count is None else current.ready >= count):
        return LoopEnd.DATA
    if -1 != trainer.max_steps <= trainer.global_step:
        return LoopEnd.MAX_STEPS
    if getattr(trainer, "validating", False):
        return LoopEnd.UNKNOWN  # it is asked between batches, of which there are more
    # An exception in a hook leaves its batch unfinished; between batches, only the loader can raise one.
    return LoopEnd.DATA if current.ready == current.started == current.completed else LoopEnd.UNKNOWN


def _ending_lines(trainer: Any, end: LoopEnd, changed: Iterable[str]) -> Iterator[str]:
    """Lines of the user's own module and callbacks that may have made the training loop end in this way.

    What they set may also be set by something else in their files.
    """
    changers = [attribute for name in changed for attribute in SET_BY.get(name, (name,))]
    attributes = ["should_stop"] if end is LoopEnd.SHOULD_STOP else changers
    if end is LoopEnd.UNKNOWN and getattr(trainer, "validating", False):
        attributes = [*_VALIDATES]
    if attributes:
        yield from _lines_that_set(trainer, attributes)
    elif end is LoopEnd.UNKNOWN:
        for scope in scopes_in(users_of(trainer)):
            yield from map(scope.place, sorted(_lines_that_may_end_iteration(scope)))


def _lines_that_may_end_iteration(scope: Scope) -> Iterator[int]:
    """Where a ``StopIteration`` may leave a function: it is raised, or ``next()`` is called without a default.

    Lightning raises one itself where ``on_train_batch_start`` returns -1.
    """
    for raised in scope.each(ast.Raise):
        name = raised.exc.func if isinstance(raised.exc, ast.Call) else raised.exc
        if isinstance(name, ast.Name) and name.id == "StopIteration":
            yield raised.lineno
    for call in scope.calls(["next"]):
        if isinstance(call.func, ast.Name) and len(call.args) == 1:
            yield call.lineno
    if scope.name == "on_train_batch_start":
        yield from (one.lineno for one in scope.each(ast.Return) if ast.unparse(one) == "return -1")


def _lines_that_set(trainer: Any, attributes: Iterable[str]) -> Iterator[str]:
    scopes, names = [*scopes_in(users_of(trainer))], {*attributes}
    found = [line for scope in scopes for line in scope.sets(names)]
    files = dict.fromkeys(scope.file for scope in scopes)
    yield from found or (line for file in files for line in _lines_in_file_that_set(file, names))


def _lines_in_file_that_set(file: str, names: set[str]) -> Iterator[str]:
    """Lines in any function of a file that set one of these attributes."""
    for scope in scopes_of(file):
        set_here = (one for node in scope.nodes for one in attributes_set(node)) if scope.is_function else ()
        yield from (scope.place(one.line) for one in set_here if one.name in names)


def _is_saving(actions: tuple[Action, ...]) -> bool:
    return any(action.name.startswith("save_checkpoint") for action in actions)


def _loaders_of(loop: Any) -> list[Any]:
    return list(getattr(getattr(loop, "_combined_loader", None), "flattened", ()))


def _number_of(batches: Any) -> int | None:
    """Lightning's number of batches; None if it is not known or infinite."""
    with suppress(TypeError, ValueError, OverflowError):
        return int(batches)
    return None


def _loader_facts(loader: Any, batches: Any) -> LoaderFacts:
    return LoaderFacts(
        dataset=type(getattr(loader, "dataset", loader)).__name__,
        num_workers=int(getattr(loader, "num_workers", 0)),
        prefetch_factor=getattr(loader, "prefetch_factor", None),
        batches=_number_of(batches),
    )
