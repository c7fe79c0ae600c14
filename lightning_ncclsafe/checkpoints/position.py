"""The position of one rank in its data and its random numbers, as plain data, and how to restore it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lightning_ncclsafe.checkpoints.loader_position import UNUSABLE, LoaderPosition, loader_position
from lightning_ncclsafe.checkpoints.position_file import PositionFile
from lightning_ncclsafe.code.patching import Replacements
from lightning_ncclsafe.probes.data.random_state import put_back, saved_states
from lightning_ncclsafe.report.terminal import say_on_stderr

_WARNED = "You're resuming from a checkpoint that ended before the epoch"

_of_trainer: "WeakKeyDictionary[Any, DataPosition]" = WeakKeyDictionary()


def capture(trainer: Any) -> dict[str, Any]:
    """What this rank needs to continue with the next batch, as plain data. Called between two training batches."""
    known = _of_trainer.get(trainer)
    if known is not None:
        return known.capture()
    return {"random": saved_states(), "batches": _batches_of(trainer), "loaders": None}


def _batches_of(trainer: Any) -> int:
    """The number of training batches in this epoch so far."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


class DataPosition:
    """The position of one rank in the training of one call of ``fit``.

    Args:
        left_behind: The file in which other ranks find the last position; None for none.
    """

    def __init__(
        self, trainer: Any, say: Callable[[str], None] = say_on_stderr, left_behind: PositionFile | None = None
    ) -> None:
        self._trainer = trainer
        self._left_behind = left_behind
        self._say = say
        self._methods = Replacements()
        self._loaders: list[LoaderPosition] = []
        """Empty if the position of any of them cannot be kept."""
        self._resumed: Mapping[str, Any] | None = None
        self._knows_all = False
        self._is_resumed = False
        self._random: Mapping[str, Any] | None = None
        self._ahead: Mapping[str, Any] | None = None
        self._can_write_ahead = True

    def attach(self) -> None:
        """Wraps the samplers of the training's loaders, each before it is read."""
        fit = self._trainer.fit_loop
        self._methods.wrap(fit, "_load_combined_loader_states", self._loaders_are_there)
        self._methods.wrap(fit.epoch_loop, "on_run_start", self._epoch_begins)
        self._methods.wrap(fit.epoch_loop, "reset", self._reset)
        if self._left_behind is not None:
            precision = self._trainer.precision_plugin
            self._methods.wrap(precision, "pre_backward", self._backward_begins)
        _of_trainer[self._trainer] = self

    def detach(self) -> None:
        """Restores Lightning's methods and the samplers."""
        self._methods.undo()
        self._release()
        _of_trainer.pop(self._trainer, None)

    def capture(self) -> dict[str, Any]:
        """See :func:`capture`."""
        position = self._after(_batches_of(self._trainer))
        if self._left_behind is not None:
            then = position | {"step": int(self._trainer.global_step)}
            # If nothing was drawn since the backward pass, this position is already written.
            if self._ahead is None or not _is_same(self._ahead, then):
                self._left_behind.write(then)
            self._ahead = None
        return position

    def _backward_begins(self, original: Callable[..., Any], *args: Any) -> Any:
        """Wraps the backward pass: after it, the other ranks can make the step even if this rank ends.

        The rest of the batch hardly draws random numbers, so the position after the batch is written now.
        """
        result = original(*args)
        trainer = self._trainer
        if self._can_write_ahead and trainer.lightning_module.automatic_optimization:
            try:
                if not trainer.fit_loop.epoch_loop._should_accumulate():
                    self._leave_ahead()
            except Exception:  # training continues
                self._can_write_ahead = False
        return result

    def _leave_ahead(self) -> None:
        assert self._left_behind is not None
        then = self._after(_batches_of(self._trainer) + 1) | {"step": int(self._trainer.global_step) + 1}
        # Does not overwrite the position before this step, which is valid until the step is made. Some optimizers make
        # several backward passes.
        self._left_behind.write(then, over_last=self._ahead is not None)
        self._ahead = then

    def _after(self, batches: int) -> dict[str, Any]:
        """The position after this many batches of the epoch, with random numbers as they are now."""
        loaders = [loader.record(batches) for loader in self._loaders]
        return {
            # Those of a checkpoint are restored in a moment.
            "random": dict(self._random) if self._random is not None else saved_states(),
            "batches": batches,
            "loaders": loaders if loaders and all(loader is not None for loader in loaders) else None,
        }

    def resume(self, saved: Mapping[str, Any] | None, *, knows_all: bool) -> None:
        """Continues from a captured position, once Lightning has restored its loops and has its loaders.

        Args:
            saved: The position of this rank; None if it is not in the checkpoint.
            knows_all: Whether the checkpoint has the data position of every rank, so that all ranks decide alike.
        """
        self._resumed = saved if saved is not None else {}
        self._knows_all = knows_all
        self._random = self._resumed.get("random")

    def _release(self) -> None:
        while self._loaders:
            self._loaders.pop().release()

    def _loaders_are_there(self, load_states: Callable[[], Any]) -> Any:
        """Called when Lightning has the training's loaders, and is about to read them."""
        self._release()
        fit = self._trainer.fit_loop
        found = fit._combined_loader.flattened if fit._combined_loader is not None else []
        positions = [loader_position(getattr(loader, "wrapped_loader", loader), self._say_first) for loader in found]
        self._loaders = [position for position in positions if position is not None]
        if len(self._loaders) < len(positions):
            self._release()
        resumed, self._resumed = self._resumed, None
        # An epoch that is over is not repeated.
        if resumed is None or not fit.restarting:
            return load_states()
        records = resumed.get("loaders") or [None] * len(self._loaders)
        batches = _batches_of(self._trainer)
        if not self._can_resume(resumed, records, batches):
            self._begin_again(batches)
            return load_states()
        # Lightning gives all ranks one rank's loader states; after that, each restores its own.
        result = load_states()
        epoch = int(fit.epoch_progress.current.processed)
        for loader, record in zip(self._loaders, records, strict=True):
            loader.resume(record, batches, epoch)
        self._is_resumed = True
        return result

    def _reset(self, reset: Callable[[], Any]) -> Any:
        """Suppresses Lightning's warning about loaders without a state: their position is known here."""
        is_resumed, self._is_resumed = self._is_resumed, False
        if not is_resumed:
            return reset()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_WARNED)
            return reset()

    def _can_resume(self, resumed: Mapping[str, Any], records: Sequence[Any], batches: int) -> bool:
        """Whether all ranks know their position in the data: the same answer on every rank."""
        if resumed.get("batches", batches) != batches or not self._loaders or len(records) != len(self._loaders):
            return False
        return all(
            loader.can_resume(record if self._knows_all else None)
            for loader, record in zip(self._loaders, records, strict=True)
        )

    def _begin_again(self, batches: int) -> None:
        """Restarts the epoch's data; weights and counters stay those of the checkpoint."""
        fit = self._trainer.fit_loop
        progress = fit.epoch_loop.batch_progress
        if not batches or progress.is_last_batch:
            return
        fit._combined_loader_states_to_load = []
        progress.current.reset()
        progress.total.started = progress.total.processed = progress.total.completed = progress.total.ready
        progress.is_last_batch = False
        self._say_first(
            f"training restarts epoch {fit.epoch_progress.current.processed} from its first batch, after {batches} "
            "batches: the data position of every rank is not known (an iterable dataset, a sampler that cannot be "
            "replayed, a rank that could not report its position, or a different number of ranks)"
        )

    def _say_first(self, text: str) -> None:
        if self._trainer.is_global_zero:
            self._say(text)

    def _epoch_begins(self, original: Callable[..., Any], *args: Any) -> Any:
        """Called when Lightning is about to train on the next batch, or to make a validation that was due."""
        result = original(*args)
        for loader in self._loaders:
            loader.catch_up()
        states, self._random = self._random, None
        if states is not None:
            try:
                put_back(states)
            except UNUSABLE as error:
                self._say(f"rank {self._trainer.global_rank}: random states of the checkpoint are unusable: {error}")
        return result


def _is_same(one: Any, other: Any) -> bool:
    """Whether two positions are equal; most of their parts are the same objects."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) or (isinstance(one, tuple) and any(isinstance(each, torch.Tensor) for each in one)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)
