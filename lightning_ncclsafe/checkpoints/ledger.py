"""Which weights belong to which counters: recorded at the boundary of each optimizer step.

Lightning's counters are ahead of the weights during a batch, and behind them between a step and the end of its batch.
So small state is copied at each boundary, and read from there when a checkpoint is made. Large state, weights and
optimizers' states, is not copied: it is read at the end, if nothing has changed it since the boundary.

On a device, the host runs ahead: work that it has queued behind a stuck collective has not run. So events are queued
with each step, which show how far the device is.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lightning_ncclsafe.checkpoints import position
from lightning_ncclsafe.checkpoints.boundary import (
    NO_STEP,
    Boundary,
    Event,
    LoopCounters,
    NotProvenError,
    group_settings,
    small_states,
)
from lightning_ncclsafe.checkpoints.weights import WatchedParameter, WatchedWeights
from lightning_ncclsafe.code.patching import Replacements
from lightning_ncclsafe.report.terminal import say_own_failure

_UNCOUNTED = "weights were changed, but by no step of self.optimizers(), which alone are counted"
# How many boundaries the host may be ahead of the device; older ones are forgotten.
_MOST_AHEAD = 512


class StepLedger:
    """Keeps the newest boundary of one rank's ``fit``, and knows whether the weights still belong to it.

    The training thread writes it, in some microseconds per batch; another thread reads it at the end. It is made when
    Lightning has restored a checkpoint and is about to start its loops.

    Args:
        make_event: Queues an event on the device; None if there is no device that the host runs ahead of.
        was_aborted: Whether a collective was aborted: on a device, work queued behind it has run all the same.
        parts: This rank's parts of a sharded model; None for a replica.

    Attributes:
        is_in_step: Whether the main thread is in the middle of an optimizer step, or right after it.
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
        self._make_event = make_event
        self._was_aborted = was_aborted
        self._methods = Replacements()
        self._boundaries: deque[Boundary] = deque(maxlen=_MOST_AHEAD)
        self.counters = LoopCounters(trainer.fit_loop)
        self.weights = WatchedWeights(trainer.lightning_module, parts)
        self._small_states = dict(small_states(trainer))
        self._first_step = trainer.global_step
        self._first_batch = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self._sees_closure = hasattr(trainer.precision_plugin, "_after_closure")
        self.is_in_step = False
        self._has_stepped = False
        self._is_behind = False
        self._validates = False
        self._why_off = ""

    # Called on the training thread.

    def attach(self) -> None:
        """Wraps methods of Lightning's training loop."""
        fit = self._trainer.fit_loop
        self._methods.wrap(fit.epoch_loop, "on_run_start", self._epoch_begins)
        self._methods.wrap(fit.epoch_loop, "update_lr_schedulers", self._schedulers_step)
        self._methods.wrap(fit.epoch_loop, "on_advance_end", self._batch_ends)
        self._methods.wrap(fit, "on_run_end", self._training_ends)
        if self._sees_closure:
            self._methods.wrap(self._trainer.precision_plugin, "_after_closure", self._closure_ended)

    def detach(self) -> None:
        """Restores Lightning's methods. What was recorded can still be read."""
        self._methods.undo()

    def step_begins(self) -> None:
        """Called before an optimizer's step, which may begin with the forward and the backward pass."""
        if not self._sees_closure:
            self._note_safely(self._note_change)

    def step_ended(self) -> None:
        """Called after an optimizer's step."""
        self.is_in_step = self._has_stepped = True

    def _closure_ended(self, original: Callable[..., Any], *args: Any, **keys: Any) -> Any:
        """Called when gradients are complete and the hooks before the step are over: next, the weights change."""
        result = original(*args, **keys)
        self._note_safely(self._note_change)
        return result

    def _note_change(self) -> None:
        if self._make_event is not None and not self.is_in_step and self._boundaries:
            boundary = self._boundaries[-1]
            boundary.versions_then = self.weights.versions()
            boundary.next_begins = self._make_event()
        self.is_in_step = True

    def _epoch_begins(self, original: Callable[..., Any], fetcher: Any) -> Any:
        result = original(fetcher)
        self._note_safely(lambda: self._note_epoch(fetcher))
        return result

    def _note_epoch(self, fetcher: Any) -> None:
        # If it resumes after the last batch of an epoch, Lightning would start the epoch's data again.
        if fetcher.length is not None and fetcher.fetched >= fetcher.length:
            fetcher.done = True
        loop = self._trainer.fit_loop.epoch_loop
        checks = loop._should_check_val_fx(fetcher)
        if not self._is_behind and not (checks and self._has_plateau()):
            self._note(is_over=True, checks=checks)

    def _schedulers_step(self, original: Callable[..., Any], interval: str, update_plateau_schedulers: bool) -> None:
        """Called when learning rates change: right after the step, and for some again at the end of an epoch."""
        original(interval, update_plateau_schedulers)
        if not update_plateau_schedulers:
            self._note_safely(lambda: self._note_step(interval))

    def _note_step(self, interval: str) -> None:
        fit = self._trainer.fit_loop
        is_last = interval == "epoch" or not fit.epoch_loop._num_ready_batches_reached()
        if is_last and not self._is_within_window():
            self._note(is_over=False, validates=fit.epoch_loop._should_check_val_fx(fit._data_fetcher))

    def _batch_ends(self, original: Callable[..., Any], fetcher: Any) -> Any:
        """Called when the hooks at the end of a batch are over; a validation may follow."""
        self._note_safely(lambda: self._note_batch(fetcher))
        result = original(fetcher)
        self._note_safely(self._note_end)
        return result

    def _note_batch(self, fetcher: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        self._is_behind = self._is_within_window()
        # As Lightning will decide, except for a validation that was already made before a resume.
        self._validates = not getattr(loop, "_skip_next_val", False) and loop._should_check_val_fx(fetcher)
        # Lightning counts a repeated validation batch twice, and would again at the next resume.
        evaluated = loop.val_loop.batch_progress.total
        if self._validates:
            evaluated.ready = evaluated.started = evaluated.completed
        if self._validates and not self._is_behind:
            self._note(is_over=True, validates=True)

    def _note_end(self) -> None:
        if self._is_behind:
            return
        # The end of an epoch, and schedulers that wait for a plateau, need what the validation has logged, which is not
        # in the checkpoint: so the validation is repeated, until the next epoch begins or, with a plateau, always.
        is_last = self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if not self._validates or not (is_last or self._has_plateau()):
            self._note(is_over=True, checks=self._validates)
        self._has_stepped = False

    def _training_ends(self, original: Callable[..., Any]) -> Any:
        self._note_safely(self._note_largest)
        return original()

    def _note_largest(self) -> None:
        if self._boundaries:
            self._boundaries[-1].largest = self.weights.largest()

    def _note_safely(self, note: Callable[[], None]) -> None:
        """Records something; if that fails, training continues, and nothing is saved at the end."""
        if self._why_off:
            return
        try:
            note()
        except Exception as error:
            self._why_off = f"the bookkeeping failed: {error!r}"
            say_own_failure(error, what="the bookkeeping of JustInTimeCheckpoint")

    def _is_within_window(self) -> bool:
        """Whether gradients of this batch are accumulated with those of later batches."""
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
            counts=self.counters.copy(),
            batches_that_stepped=trainer.fit_loop.epoch_loop._batches_that_stepped,
            schedulers=[{**config.scheduler.state_dict()} for config in trainer.lr_scheduler_configs],
            groups=[*map(group_settings, trainer.optimizers)],
            is_over=is_over,
            validates=validates,
            checks=checks,
            versions=self.weights.versions(),
        )
        if is_over:
            boundary.position = position.capture(trainer)
            boundary.states = {key: copy_state() for key, copy_state in self._small_states.items()}
            loader = trainer.fit_loop._combined_loader
            boundary.loaders = loader._state_dicts() if loader is not None else []
        if is_over and validates:
            boundary.largest = self.weights.largest()
        self.weights.copy_buffers()
        if self._make_event is not None:
            boundary.done = self._make_event()
        # In this order: another thread may read at any moment.
        self._boundaries.append(boundary)
        self.is_in_step = False
        self._forget_passed()

    def _forget_passed(self) -> None:
        """Keeps only the newest of the boundaries that the device has passed."""
        while len(self._boundaries) > 1:
            following = self._boundaries[1].done
            if following is not None and not following.query():
                return
            self._boundaries.popleft()

    # Called on another thread, at the end.

    @property
    def is_on_device(self) -> bool:
        """Whether training uses a device that the host runs ahead of."""
        return self._make_event is not None

    def newest(self) -> Boundary:
        """The boundary that the present weights on the device belong to.

        Raises:
            NotProvenError: There is none, or that is unknown.
        """
        boundary = self._reached()
        if boundary.step == self._first_step:
            has_trained = self._trainer.fit_loop.epoch_loop.batch_progress.total.completed > self._first_batch
            changed = has_trained and self.weights.changed(boundary.versions, self.weights.versions())
            raise NotProvenError(_UNCOUNTED if changed else NO_STEP)
        self.check(boundary)
        return boundary

    def check(self, boundary: Boundary) -> None:
        """Checks, before and after weights are read, that nothing has changed them.

        Raises:
            NotProvenError: The weights no longer belong to the boundary, or not for sure.
        """
        if self._reached() is not boundary:
            raise NotProvenError("training continued meanwhile")
        is_ahead = boundary.next_begins is not None
        if self.is_in_step and not is_ahead:
            raise NotProvenError("the main thread was in an optimizer step, or right after one")
        now = boundary.versions_then if is_ahead else self.weights.versions()
        changed = self.weights.changed(boundary.versions, now)
        if not changed and boundary.largest is not None:
            changed = self.weights.changed_values(boundary.largest)
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise NotProvenError(f"{changed[0]!r}{more} changed after the last optimizer step, outside of a step")

    def _reached(self) -> Boundary:
        """The newest boundary that the device has passed."""
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
