"""What belongs together at the boundary of an optimizer step, as far as it is small enough to be copied there."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lightning_ncclsafe._lightning import package_of
from lightning_ncclsafe._torch import tensors

# Values of a callback's or a datamodule's state that is copied at each boundary; a larger one is read in the end.
_MOST_VALUES = 256


NO_STEP = "no optimizer step was made yet"
"""Why there is nothing to save at the beginning, which is no problem."""


class NotProvenError(RuntimeError):
    """What there is does not belong together; the message says why."""


class Event(Protocol):
    """A moment in what is queued on a device, as ``torch.cuda.Event`` marks it."""

    def query(self) -> bool:
        """Whether all has been done that was queued before; never waits."""


@dataclass(slots=True, kw_only=True)
class Boundary:
    """What belongs to the weights after one optimizer step.

    Attributes:
        step: Lightning's ``global_step``.
        epoch: Its ``current_epoch``.
        counts: The counters of all loops, see :class:`~lightning_ncclsafe.checkpoints.boundary.LoopCounters`.
        batches_that_stepped: Lightning's count of them, by which loggers number what they log.
        schedulers: The states of learning rate schedulers.
        groups: What the parameter groups of each optimizer have set, without the parameters.
        is_over: Whether the batch is over; its hooks at the end may be under way otherwise.
        validates: Whether a validation comes before the next batch.
        checks: Whether Lightning, resumed here, takes the batch for one that a validation follows.
        states: States of callbacks by their keys, and of the datamodule under an empty one, that were copied.
        loaders: States of the training's loaders that have one.
        position: See :func:`~lightning_ncclsafe.checkpoints.position.capture`; None while the batch is not over.
        versions: See :meth:`~lightning_ncclsafe.checkpoints.weights.WatchedWeights.versions`.
        largest: The largest absolute value of each tensor of weights, where that was noted.
        done: On a device, passed when the step has been made there.
        next_begins: On a device, passed right before the next step changes anything there.
        versions_then: Like ``versions``, by the host's time of that.
    """

    step: int
    epoch: int
    counts: list[dict[str, Any]]
    batches_that_stepped: int
    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    is_over: bool
    validates: bool = False
    checks: bool = False
    states: dict[str, Any] = field(default_factory=dict)
    loaders: list[Any] = field(default_factory=list)
    position: Any = None
    versions: list[tuple[int, ...]] = field(default_factory=list)
    largest: Any = None
    done: Event | None = None
    next_begins: Event | None = None
    versions_then: list[tuple[int, ...]] = field(default_factory=list)


def group_settings(optimizer: Any) -> list[dict[str, Any]]:
    """What the parameter groups of an optimizer have set, without the parameters."""
    return [_without_parameters(group) for group in optimizer.param_groups]


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    # A learning rate that is a tensor is changed in place.
    return {
        name: value.detach().clone() if tensors.is_tensor(value) else value
        for name, value in group.items()
        if name != "params"
    }


def loader_states(trainer: Any) -> list[Any]:
    """The states of the training's loaders that have one."""
    loader = trainer.fit_loop._combined_loader
    return loader._state_dicts() if loader is not None else []


def small_states(trainer: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What copies the state of each callback, by its key, and of the datamodule, under an empty one, if it is small."""
    owners = [(callback.state_key, callback) for callback in trainer.callbacks]
    if trainer.datamodule is not None:
        owners.append(("", trainer.datamodule))
    for key, owner in owners:
        # Most have only what Lightning gives to each, which is empty.
        kind = next(kind for kind in type(owner).__mro__ if "state_dict" in vars(kind))
        if package_of(kind) and kind.__name__ in ("Callback", "LightningDataModule"):
            continue
        try:
            _state_of(owner)
        except Exception:  # too large, or not to be asked now: it is read in the end
            continue
        yield key, partial(_state_of, owner)


def _state_of(owner: Any) -> Any:
    return _plain_copy(owner.state_dict())


def _plain_copy(state: Any) -> Any:
    """A copy of containers, with the very values that they hold.

    Raises:
        ValueError: It is too large to be copied at each boundary.
    """
    room = [_MOST_VALUES]

    def copied(value: Any) -> Any:
        room[0] -= 1
        if room[0] < 0:
            raise ValueError("too large")
        if type(value) is dict:
            return {key: copied(each) for key, each in value.items()}
        if type(value) in (list, tuple, set):
            return type(value)(map(copied, value))
        return value

    return copied(state)


_BATCHES, _EVALUATED = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"


class LoopCounters:
    """The counters of the training loop and of those within it.

    Args:
        fit_loop: Lightning's training loop.
    """

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        self._progress = [*_progress(fit_loop)]
        self._parts = [vars(part) for _, progress in self._progress for part in _parts(progress)]

    def copy(self) -> list[dict[str, Any]]:
        """All of them as they are now, in an order of their own."""
        return [part.copy() for part in self._parts]

    def loop_state(self, boundary: Boundary) -> dict[str, Any]:
        """What a checkpoint has of the training loop, as of the boundary.

        Resumed from it, Lightning goes on with the next batch, after a validation if that was to come first.
        """
        state: dict[str, Any] = self._fit_loop.state_dict()
        counts = iter(boundary.counts)
        for name, progress in self._progress:
            # A copy has parts of its own, in the same order.
            mirrored = copy.deepcopy(progress)
            for part in _parts(mirrored):
                vars(part).update({key: value for key, value in next(counts).items() if not hasattr(value, "__dict__")})
            if name in (_BATCHES, _EVALUATED):
                _complete(mirrored.total, mirrored.current)
            if name == _EVALUATED and boundary.validates:
                _begin_again(mirrored)
            state[name] = mirrored.state_dict()
        # Lightning adds one where it comes to the end of a batch again, and not where it begins with the next.
        stepped = boundary.batches_that_stepped + (not boundary.is_over and not boundary.validates) - boundary.checks
        state["epoch_loop.state_dict"] = {**state["epoch_loop.state_dict"], "_batches_that_stepped": stepped}
        if boundary.loaders:
            state["state_dict"] = {**state["state_dict"], "combined_loader": boundary.loaders}
        return state


def _progress(loop: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The counters of a loop and of those within it, by their names in a checkpoint."""
    for name, value in vars(loop).items():
        if type(value).__module__.endswith(".loops.progress"):
            yield f"{prefix}{name}", value
        elif any(kind.__module__.endswith(".loops.loop") for kind in type(value).__mro__):
            yield from _progress(value, f"{prefix}{name}.")


def _parts(progress: Any) -> Iterator[Any]:
    """A counter, and those that it is made of."""
    yield progress
    for value in vars(progress).values():
        if hasattr(value, "__dict__"):
            yield from _parts(value)


def _complete(*counts: Any) -> None:
    for count in counts:
        # Of the training's batch all is done but its hooks, and an evaluation that has been is not gone back to.
        count.ready = count.started = count.completed = count.processed


def _begin_again(evaluated: Any) -> None:
    """As Lightning leaves a validation in the middle of its first batch: then it goes back to it."""
    evaluated.current.reset()
    evaluated.is_last_batch = False
    for count in (evaluated.total, evaluated.current):
        count.ready = count.started = count.completed + 1
