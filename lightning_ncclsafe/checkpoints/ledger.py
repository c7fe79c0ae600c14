"""What belongs together at the boundary of an optimizer step: weights, and the counters that go with them.

Lightning's counters run ahead of the weights while a batch is under way, and behind them between a step and the end of
its batch. So what is small is copied at each boundary, and read from there when a checkpoint is made. What is large,
weights and optimizers' states, is not copied: it is read in the end, if nothing has changed it since the boundary.
Tensors count their changes themselves, and where each lies is noted, as whoever assigns to ``.data`` puts another one
there. Writes through ``.data`` are not counted; callbacks that average weights make them around a validation and at the
end of training, so the largest values of all tensors are noted there as well.

On a device the host runs ahead: what it has queued behind a collective that is stuck has not run. So events are queued
with each step, and tell how far the device has come.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from lightning_ncclsafe._lightning import package_of
from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.checkpoints import position
from lightning_ncclsafe.code.patching import ReplacedMethod
from lightning_ncclsafe.report.terminal import say_own_failure

NO_STEP = "no optimizer step was made yet"
"""Why there is nothing to save at the beginning."""
_UNCOUNTED = "weights were changed, but by no step of self.optimizers(), which alone are counted"

# Buffers that are copied at each boundary, all together: statistics of normalization, which each forward pass changes.
_MOST_BUFFER_BYTES = 64 << 20
# Values of a callback's or a datamodule's state that is copied at each boundary; a larger one is read in the end.
_MOST_VALUES = 256
# Boundaries by which the host may be ahead of the device; what is older is not known any more.
_MOST_AHEAD = 512

_BATCHES, _EVALUATED = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"


class Event(Protocol):
    """A moment in what is queued on a device, as ``torch.cuda.Event`` marks it."""

    def query(self) -> bool:
        """Whether all has been done that was queued before; never waits."""


class NotProvenError(RuntimeError):
    """What there is does not belong together; the message says why."""


class WatchedParameter(NamedTuple):
    """What this rank has of one parameter, or of a large buffer.

    Attributes:
        name: Its name.
        parameter: What is changed, and counts that: the parameter as optimizers know it.
        values: Gives what is here of it now, wherever the module has it.
    """

    name: str
    parameter: Any
    values: Callable[[], Any]


@dataclass(slots=True, kw_only=True)
class Boundary:
    """What belongs to the weights after one optimizer step.

    Attributes:
        step: Lightning's ``global_step``.
        epoch: Its ``current_epoch``.
        counts: The counters of all loops, in the order in which the ledger goes through them.
        batches_that_stepped: Lightning's count of them, by which loggers number what they log.
        schedulers: The states of learning rate schedulers.
        groups: What the parameter groups of each optimizer have set, without the parameters.
        is_over: Whether the batch is over; its hooks at the end may be under way otherwise.
        validates: Whether a validation comes before the next batch.
        checks: Whether Lightning, resumed here, takes the batch for one that a validation follows.
        states: States of callbacks by their keys, and of the datamodule under an empty one, that were copied.
        loaders: States of the training's loaders that have one.
        position: See :func:`~lightning_ncclsafe.checkpoints.position.capture`; None while the batch is not over.
        versions: How often each tensor of weights had been changed, and of a replica where it lay.
        largest: The largest absolute value of each, where that was noted.
        done: On a device, passed when the step has been made there.
        next_begins: On a device, passed right before the next step changes anything there.
        versions_then: Likewise, by the host's time of that.
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


class StepLedger:
    """Keeps the newest boundary of one rank's ``fit``, and whether its weights are those of it.

    The training's thread writes it, in some microseconds a batch; another one reads it in the end.

    Args:
        trainer: The ``Trainer``.
        make_event: Queues an event on the device; None where there is no device that the host runs ahead of.
        was_aborted: Whether a collective was given up: what was queued behind it has run all the same, on a device.
        parts: This rank's parts of a model that is split; None for a replica.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        make_event: Callable[[], Event] | None = None,
        was_aborted: Callable[[], bool] = lambda: False,
        parts: Sequence[WatchedParameter] | None = None,
    ) -> None:
        self._trainer = trainer
        self._parts = parts
        self._make_event = make_event
        self._was_aborted = was_aborted
        self._methods: list[ReplacedMethod] = []
        self._boundaries: deque[Boundary] = deque(maxlen=_MOST_AHEAD)
        self._progress: list[tuple[str, Any]] = []
        self._counts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._tensors: list[Any] = []
        self._values: list[Callable[[], Any]] = []
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._copies: list[Any] = []
        self._stateful: dict[str, Callable[[], Any]] = {}
        self._first_step = self._first_batch = 0
        self._sees_begin = False
        self._is_changing = False
        self._has_stepped = False
        self._is_behind = False
        self._validates = False
        self._why_off = ""

    # What the training's thread calls.

    def attach(self) -> None:
        """Listens to Lightning's training loop, which is about to begin."""
        trainer = self._trainer
        loop, precision = trainer.fit_loop.epoch_loop, trainer.precision_plugin
        self._first_step, self._first_batch = trainer.global_step, loop.batch_progress.total.completed
        self._progress = [*_progress(trainer.fit_loop)]
        self._counts = [vars(part) for _, progress in self._progress for part in _parts(progress)]
        self._stateful = dict(_stateful(trainer))
        self._find_tensors()
        begin = ReplacedMethod(loop, "on_run_start", lambda fetcher: self._epoch_begins(begin, fetcher))
        rates = ReplacedMethod(loop, "update_lr_schedulers", lambda *args, **keys: self._adapt(rates, *args, **keys))
        end = ReplacedMethod(loop, "on_advance_end", lambda fetcher: self._batch_ends(end, fetcher))
        last = ReplacedMethod(trainer.fit_loop, "on_run_end", lambda: self._training_ends(last))
        self._methods = [begin, rates, end, last]
        self._sees_begin = hasattr(precision, "_after_closure")
        if self._sees_begin:
            closed = ReplacedMethod(
                precision, "_after_closure", lambda *args, **keys: self._closed(closed, *args, **keys)
            )
            self._methods.append(closed)

    def detach(self) -> None:
        """Lightning is as it was. What has been noted can still be read."""
        while self._methods:
            self._methods.pop().remove()

    def step_begins(self) -> None:
        """An optimizer's step is called, which may begin with the forward and the backward pass."""
        if not self._sees_begin:
            self._unharmed(self._changes)

    def step_ended(self) -> None:
        """An optimizer's step has returned."""
        self._is_changing = self._has_stepped = True

    def _closed(self, closed: ReplacedMethod, *args: Any, **keys: Any) -> Any:
        """Gradients are there, and hooks before the step are over: what comes next changes weights."""
        result = closed.original(*args, **keys)
        self._unharmed(self._changes)
        return result

    def _changes(self) -> None:
        if self._make_event is not None and not self._is_changing and self._boundaries:
            boundary = self._boundaries[-1]
            boundary.versions_then = self._versions()
            boundary.next_begins = self._make_event()
        self._is_changing = True

    def _epoch_begins(self, begin: ReplacedMethod, fetcher: Any) -> Any:
        result = begin.original(fetcher)
        self._unharmed(lambda: self._note_epoch(fetcher))
        return result

    def _note_epoch(self, fetcher: Any) -> None:
        # Resumed after the last batch of an epoch, Lightning would begin with its data once more.
        if fetcher.length is not None and fetcher.fetched >= fetcher.length:
            fetcher.done = True
        loop = self._trainer.fit_loop.epoch_loop
        checks = loop._should_check_val_fx(fetcher)
        if not self._is_behind and not (checks and self._has_plateau()):
            self._note(is_over=True, checks=checks)

    def _adapt(self, rates: ReplacedMethod, interval: str, update_plateau_schedulers: bool) -> None:
        """Learning rates change right after the step, and some of them once more at the end of an epoch."""
        rates.original(interval, update_plateau_schedulers)
        if not update_plateau_schedulers:
            self._unharmed(lambda: self._note_step(interval))

    def _note_step(self, interval: str) -> None:
        fit = self._trainer.fit_loop
        is_last = interval == "epoch" or not fit.epoch_loop._num_ready_batches_reached()
        if is_last and not self._is_within_window():
            self._note(is_over=False, validates=fit.epoch_loop._should_check_val_fx(fit._data_fetcher))

    def _batch_ends(self, end: ReplacedMethod, fetcher: Any) -> Any:
        """Hooks at the end of a batch are over; a validation may follow."""
        self._unharmed(lambda: self._note_batch(fetcher))
        result = end.original(fetcher)
        self._unharmed(self._note_end)
        return result

    def _note_batch(self, fetcher: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        self._is_behind = self._is_within_window()
        # As Lightning is about to decide it, but for a validation that was before a resume.
        self._validates = not getattr(loop, "_skip_next_val", False) and loop._should_check_val_fx(fetcher)
        # A batch of validation that Lightning goes back to is counted twice: it would do so again with the next resume.
        evaluated = loop.val_loop.batch_progress.total
        if self._validates:
            evaluated.ready = evaluated.started = evaluated.completed
        if self._validates and not self._is_behind:
            self._note(is_over=True, validates=True)

    def _note_end(self) -> None:
        if self._is_behind:
            return
        # What comes at the end of an epoch, and schedulers that wait for a plateau, need what a validation has logged,
        # which no checkpoint has: until the next epoch begins, or without end, that validation is made again.
        is_last = self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if not self._validates or not (is_last or self._has_plateau()):
            self._note(is_over=True, checks=self._validates)
        self._has_stepped = False

    def _training_ends(self, last: ReplacedMethod) -> Any:
        self._unharmed(self._note_largest)
        return last.original()

    def _note_largest(self) -> None:
        if self._boundaries:
            self._boundaries[-1].largest = self._largest()

    def _unharmed(self, note: Callable[[], None]) -> None:
        """Training goes on whatever happens here, and then nothing is saved in the end."""
        if self._why_off:
            return
        try:
            note()
        except Exception as error:
            self._why_off = f"the bookkeeping failed: {error!r}"
            say_own_failure(error, what="the bookkeeping of JustInTimeCheckpoint")

    def _is_within_window(self) -> bool:
        """Whether gradients of this batch wait for those of others."""
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            return not self._has_stepped
        return bool(trainer.fit_loop.epoch_loop._should_accumulate())

    def _has_plateau(self) -> bool:
        return any(config.reduce_on_plateau for config in self._trainer.lr_scheduler_configs)

    def _note(self, *, is_over: bool, validates: bool = False, checks: bool = False) -> None:
        trainer = self._trainer
        boundary = Boundary(
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            counts=[part.copy() for part in self._counts],
            batches_that_stepped=trainer.fit_loop.epoch_loop._batches_that_stepped,
            schedulers=[{**config.scheduler.state_dict()} for config in trainer.lr_scheduler_configs],
            groups=[[_without_parameters(group) for group in one.param_groups] for one in trainer.optimizers],
            is_over=is_over,
            validates=validates,
            checks=checks,
            versions=self._versions(),
        )
        if is_over:
            boundary.position = position.capture(trainer)
            boundary.states = {key: _plain_copy(read()) for key, read in self._stateful.items()}
            boundary.loaders = _loader_states(trainer)
        if is_over and validates:
            boundary.largest = self._largest()
        if self._copies:
            tensors.copy_all(self._copies, [buffers[name] for buffers, name in self._buffers])
        if self._make_event is not None:
            boundary.done = self._make_event()
        # In this order: another thread may look at any moment.
        self._boundaries.append(boundary)
        self._is_changing = False
        self._forget_passed()

    def _forget_passed(self) -> None:
        """Of the boundaries that the device has passed only the newest counts."""
        while len(self._boundaries) > 1:
            following = self._boundaries[1].done
            if following is not None and not following.query():
                return
            self._boundaries.popleft()

    def _find_tensors(self) -> None:
        """What is saved of the model: parameters, and buffers, of which the small ones are copied."""
        module = self._trainer.lightning_module
        parts = self._parts
        if parts is None:
            parts = [
                WatchedParameter(name, parameter, partial(_same, parameter))
                for name, parameter in module.named_parameters()
            ]
        found = [*parts]
        room = _MOST_BUFFER_BYTES
        for full_name, owner, name in sorted(tensors.saved_buffers(module), key=lambda each: each[1][each[2]].nbytes):
            room -= owner[name].nbytes
            if room >= 0 and tensors.spread_size(owner[name]) is None:
                self._buffers.append((owner, name))
                self._copies.append(owner[name].detach().clone())
            else:
                found.append(WatchedParameter(full_name, owner[name], partial(_same, owner[name])))
        self._names = [each.name for each in found]
        self._tensors, self._values = [each.parameter for each in found], [each.values for each in found]

    def _versions(self) -> list[tuple[int, ...]]:
        counts = tensors.change_counts(self._tensors)
        # FSDP itself puts gathered parameters in the place of its parts.
        return [*(zip(counts, tensors.addresses(self._tensors), strict=True) if self._parts is None else zip(counts))]

    def _largest(self) -> Any:
        return tensors.largest(values() for values in self._values)

    # What another thread calls, in the end.

    @property
    def is_on_device(self) -> bool:
        """Whether there is a device that the host runs ahead of."""
        return self._make_event is not None

    @property
    def is_in_step(self) -> bool:
        """Whether the main thread is in the middle of an optimizer step, or right after it."""
        return self._is_changing

    def newest(self) -> Boundary:
        """The boundary whose weights are those that are there now, on the device.

        Raises:
            NotProvenError: There is none, or that cannot be told.
        """
        boundary = self._reached()
        if boundary.step == self._first_step:
            has_trained = self._trainer.fit_loop.epoch_loop.batch_progress.total.completed > self._first_batch
            raise NotProvenError(_UNCOUNTED if has_trained and self._versions() != boundary.versions else NO_STEP)
        self.check(boundary)
        return boundary

    def check(self, boundary: Boundary) -> None:
        """Asked before weights are read and once they have been: nothing has changed them.

        Raises:
            NotProvenError: They are not, or not for sure, those of the boundary any more.
        """
        if self._reached() is not boundary:
            raise NotProvenError("training continued meanwhile")
        if boundary.next_begins is None:
            if self._is_changing:
                raise NotProvenError("the main thread was in an optimizer step, or right after one")
            now = self._versions()
        else:
            now = boundary.versions_then
        changed = [
            name for name, before, after in zip(self._names, boundary.versions, now, strict=True) if before != after
        ]
        if not changed and boundary.largest is not None:
            pairs = zip(self._names, boundary.largest, self._largest(), strict=True)
            changed = [name for name, before, after in pairs if not _is_same(before, after)]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise NotProvenError(f"{changed[0]!r}{more} changed after the last optimizer step, outside of a step")

    def _reached(self) -> Boundary:
        """How far the device has come."""
        if self._why_off:
            raise NotProvenError(self._why_off)
        boundaries = [*self._boundaries]
        if not boundaries:
            raise NotProvenError(NO_STEP)
        if self._make_event is not None and self._was_aborted():
            raise NotProvenError("a collective was aborted, and the work queued behind it ran on partial sums")
        passed = [each for each in boundaries if each.done is None or each.done.query()]
        if not passed:
            raise NotProvenError("the device is more steps behind than are recorded")
        newest = passed[-1]
        if newest.next_begins is not None and newest.next_begins.query():
            raise NotProvenError("the device was in an optimizer step")
        return newest

    def loops(self, boundary: Boundary) -> dict[str, Any]:
        """What a checkpoint has of the training loop, as of the boundary.

        Resumed from it, Lightning goes on with the next batch, after a validation if that was to come first.
        """
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        counts = iter(boundary.counts)
        for name, progress in self._progress:
            # A copy has parts of its own, in the same order.
            mirrored = copy.deepcopy(progress)
            for part in _parts(mirrored):
                vars(part).update({key: value for key, value in next(counts).items() if not hasattr(value, "__dict__")})
            if name == _BATCHES:
                _complete(mirrored.total, mirrored.current)
            if name == _EVALUATED:
                _complete(mirrored.total, mirrored.current)
                if boundary.validates:
                    # As Lightning leaves a validation in the middle of its first batch: then it goes back to it.
                    mirrored.current.reset()
                    mirrored.is_last_batch = False
                    for count in (mirrored.total, mirrored.current):
                        count.ready = count.started = count.completed + 1
            state[name] = mirrored.state_dict()
        # Lightning adds one where it comes to the end of a batch again, and not where it begins with the next.
        stepped = boundary.batches_that_stepped + (not boundary.is_over and not boundary.validates) - boundary.checks
        state["epoch_loop.state_dict"] = {**state["epoch_loop.state_dict"], "_batches_that_stepped": stepped}
        if boundary.loaders:
            state["state_dict"] = {**state["state_dict"], "combined_loader": boundary.loaders}
        return state

    def copied_buffers(self) -> dict[tuple[Any, ...], Any]:
        """Buffers as they were at the boundary, by what ``_torch.tensors.place_of`` says of them."""
        places = (tensors.place_of(buffers[name]) for buffers, name in self._buffers)
        return dict(zip(places, self._copies, strict=True))


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


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    # A learning rate that is a tensor is changed in place.
    return {
        name: value.detach().clone() if tensors.is_tensor(value) else value
        for name, value in group.items()
        if name != "params"
    }


def _stateful(trainer: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What of the callbacks and the datamodule has a small state."""
    owners = [(callback.state_key, callback) for callback in trainer.callbacks]
    if trainer.datamodule is not None:
        owners.append(("", trainer.datamodule))
    for key, owner in owners:
        # Most have only what Lightning gives to each, which is empty.
        kind = next(kind for kind in type(owner).__mro__ if "state_dict" in vars(kind))
        if package_of(kind) and kind.__name__ in ("Callback", "LightningDataModule"):
            continue
        try:
            _plain_copy(owner.state_dict())
        except Exception:  # too large, or not to be asked now: it is read in the end
            continue
        yield key, owner.state_dict


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


def _loader_states(trainer: Any) -> list[Any]:
    loader = trainer.fit_loop._combined_loader
    return loader._state_dicts() if loader is not None else []


def _same(value: Any) -> Any:
    return value


def _is_same(one: Any, other: Any) -> bool:
    """Whether two numbers are the same, not being one included."""
    first, second = float(one), float(other)
    return first == second or (first != first and second != second)
