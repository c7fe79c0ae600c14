"""What belongs to the weights at the boundary of an optimizer step, copied there if small: counters and states."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lightning_ncclsafe._lightning import package_of
from lightning_ncclsafe._torch import tensors

# A callback's or a datamodule's state of at most this many values is copied at each boundary; a larger one is read at
# the end.
_MOST_VALUES = 256


NO_STEP = "no optimizer step has been made yet"
"""Why there is nothing to save at the beginning; not a problem."""


class NotProvenError(RuntimeError):
    """The state cannot be proven consistent; the message says why."""


class Event(Protocol):
    """A point in the work queued on a device, as ``torch.cuda.Event`` marks it."""

    def query(self) -> bool:
        """Whether all work queued before is done; never waits."""


@dataclass(slots=True, kw_only=True)
class Boundary:
    """What belongs to the weights after one optimizer step.

    Attributes:
        step: Lightning's ``global_step``.
        epoch: Its ``current_epoch``.
        counts: The counters of all loops, see :class:`~lightning_ncclsafe.checkpoints.boundary.LoopCounters`.
        batches_that_stepped: Lightning's count of batches with a step, which loggers use as their step.
        schedulers: The states of learning rate schedulers.
        groups: The settings of each optimizer's parameter groups, without the parameters.
        is_over: Whether the batch is over; if not, the hooks at its end may still run.
        validates: Whether a validation comes before the next batch.
        checks: Whether Lightning, resumed from here, assumes that a validation follows the batch.
        states: Copied states of callbacks by their keys, and of the datamodule under an empty key.
        loaders: States of those training loaders that have one.
        position: See :func:`~lightning_ncclsafe.checkpoints.position.capture`; None while the batch is not over.
        versions: See :meth:`~lightning_ncclsafe.checkpoints.weights.WatchedWeights.versions`.
        largest: The largest absolute value of each tensor of weights, if recorded.
        done: On a device, the end of the step.
        next_begins: On a device, the point right before the next step changes anything.
        versions_then: Like ``versions``, when the host queued that point.
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
    """The settings of an optimizer's parameter groups, without the parameters."""
    # A learning rate that is a tensor changes in place.
    return [
        {
            name: value.detach().clone() if tensors.is_tensor(value) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def small_states(trainer: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Functions that copy small states: of each callback, by its key, and of the datamodule, under an empty key."""
    owners = [(callback.state_key, callback) for callback in trainer.callbacks]
    if trainer.datamodule is not None:
        owners.append(("", trainer.datamodule))
    for key, owner in owners:
        # Most have only Lightning's default, which is empty.
        kind = next(kind for kind in type(owner).__mro__ if "state_dict" in vars(kind))
        if package_of(kind) and kind.__name__ in ("Callback", "LightningDataModule"):
            continue
        try:
            _state_of(owner)
        except Exception:  # too large, or not available now: it is read at the end
            continue
        yield key, partial(_state_of, owner)


def _state_of(owner: Any) -> Any:
    """The state of a callback or a datamodule; containers in it are copied, values are not.

    Raises:
        ValueError: The state is too large to be copied at each boundary.
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

    return copied(owner.state_dict())


_BATCHES, _EVALUATED = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"


class LoopCounters:
    """The counters of the training loop and of those within it."""

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        self._progress = [*_progress(fit_loop)]
        self._parts = [vars(part) for _, progress in self._progress for part in _parts(progress)]

    def copy(self) -> list[dict[str, Any]]:
        """All counters as they are now, always in the same order."""
        return [part.copy() for part in self._parts]

    def loop_state(self, boundary: Boundary) -> dict[str, Any]:
        """The state of the training loop in a checkpoint, as of the boundary.

        When it resumes from that, Lightning continues with the next batch, after a validation if one was due.
        """
        state: dict[str, Any] = self._fit_loop.state_dict()
        counts = iter(boundary.counts)
        for name, progress in self._progress:
            # A copy has its own parts, in the same order.
            mirrored = copy.deepcopy(progress)
            for part in _parts(mirrored):
                vars(part).update({key: value for key, value in next(counts).items() if not hasattr(value, "__dict__")})
            if name in (_BATCHES, _EVALUATED):
                # Of the training batch, only hooks are left, and an evaluation that is over is not repeated.
                for count in (mirrored.total, mirrored.current):
                    count.ready = count.started = count.completed = count.processed
            if name == _EVALUATED and boundary.validates:
                _begin_again(mirrored)
            state[name] = mirrored.state_dict()
        # Lightning adds one when it reaches the end of a batch again, but not when it begins with the next batch.
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
    """A counter and its parts."""
    yield progress
    for value in vars(progress).values():
        if hasattr(value, "__dict__"):
            yield from _parts(value)


def _begin_again(evaluated: Any) -> None:
    """As if Lightning had stopped in the middle of the first validation batch: then it validates again."""
    evaluated.current.reset()
    evaluated.is_last_batch = False
    for count in (evaluated.total, evaluated.current):
        count.ready = count.started = count.completed + 1
