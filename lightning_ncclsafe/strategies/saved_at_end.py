"""What one call of ``fit`` saves when its run is ended, and goes on from: for the callback that asks for it.

The Trainer is used by duck type; Lightning is not imported here.
"""

import time
from collections.abc import Callable
from typing import Any

from lightning_ncclsafe._torch import process_groups, tensors
from lightning_ncclsafe.checkpoints.ledger import StepLedger
from lightning_ncclsafe.checkpoints.resuming import Resuming
from lightning_ncclsafe.checkpoints.saving import Saver
from lightning_ncclsafe.checkpoints.shards import OwnShard
from lightning_ncclsafe.exchange import Exchange
from lightning_ncclsafe.guard.local_ranks import Place
from lightning_ncclsafe.report.terminal import say_own_failure
from lightning_ncclsafe.settings import CheckpointSettings
from lightning_ncclsafe.sigterm.agreement import StopAgreement

# What a save is given where the run is ended: within it a report was written before, and processes end after it.
_SAVE_S = 10.0
# The part of a scheduler's time after which a main thread that has not stopped yet is not waited for any more.
_OVERDUE = 0.4
# What processes need to end once a save is over, of the time that a scheduler leaves them.
_LEAVES_S = 3.0


class LastCheckpoint:
    """The last checkpoint that somebody else has saved in this call, as a ``ModelCheckpoint`` does.

    Attributes:
        path: Its name; empty if there was none.
        took_s: How long all ranks took for it, seconds.
    """

    def __init__(self) -> None:
        self.path = ""
        self.took_s = 0.0
        self._begun: tuple[str, float] | None = None

    def begin(self, path: Any) -> None:
        """One is about to be written."""
        self._begun = str(path), time.monotonic()

    def end(self) -> None:
        """It is there, for all ranks."""
        if self._begun is not None:
            self.path, self.took_s = self._begun[0], time.monotonic() - self._begun[1]
            self._begun = None


class SavedAtEnd:
    """The saver of one call, its ledger, and resuming from a checkpoint.

    Args:
        trainer: The ``Trainer``.
        settings: Gives what the user has set; None if no callback asks for it.
        weights: The state of the model, by Lightning's own way to it.
        is_on_gpu: Whether the host runs ahead of what it trains on.
        stop: Gives the agreement on where to stop on SIGTERM; None where there is none.
        requeue: Has the scheduler queue the job again, if that is wanted; called once the state is saved.

    Attributes:
        ledger: Knows which weights belong to which counters; None if no callback asks for it.
        last_checkpoint: What others save.
    """

    def __init__(
        self,
        trainer: Any,
        settings: Callable[[], CheckpointSettings | None],
        *,
        weights: Callable[[], Any],
        is_on_gpu: Callable[[], bool],
        stop: Callable[[], StopAgreement | None],
        requeue: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._weights = weights
        self._is_on_gpu = is_on_gpu
        self._stop = stop
        self._requeue = requeue
        self.ledger: StepLedger | None = None
        self.last_checkpoint = LastCheckpoint()
        self._connected: tuple[Place, Exchange] | None = None
        self._saver: Saver | None = None
        self._resuming: Resuming | None = None

    def connect(self, place: Place, exchange: Exchange) -> None:
        """All ranks are there: from now on Lightning's question for a checkpoint is answered."""
        self._connected = place, exchange
        settings = self._settings()
        if settings is None:
            return
        first = place.rank - place.local_rank
        resuming = Resuming(
            self._trainer,
            settings,
            exchange,
            rank=place.rank,
            world_size=place.world_size,
            local_ranks=range(first, first + place.local_world_size),
        )
        try:
            resuming.attach()
        except Exception as error:  # the run goes on as if it were the first
            say_own_failure(error, what="resuming from a checkpoint")
        else:
            self._resuming = resuming

    def set_up(self) -> None:
        """Lightning is about to begin with its loops, and has restored what a checkpoint had."""
        if self._connected is None:
            return
        try:
            self._saver = self._make_saver(*self._connected)
            if self.ledger is not None:
                self.ledger.attach()
        except Exception as error:  # nothing is saved then
            self._saver = None
            say_own_failure(error, what="just-in-time saving")

    def poll(self) -> None:
        """Called while the run goes on."""
        settings = self._settings() if self._saver is not None else None
        stop = self._stop()
        if stop and settings and stop.is_asked and stop.asked_for_s > settings.grace_s * _OVERDUE:
            # The main thread does not come to its next batch in time: what there is, is saved beside it.
            self._begin("SIGTERM", raised=False)

    def save(self, cause: str, raised: bool) -> Callable[[], None]:
        """Begins to save the state of a run that ends, if a callback asks for it.

        Args:
            cause: Why it ends.
            raised: Whether this rank has failed itself.

        Returns:
            What waits until that is over.
        """
        self._begin(cause or "SIGTERM", raised=raised)
        return self._saver.wait if self._saver is not None else lambda: None

    def detach(self, safely: Callable[[Callable[[], None]], object]) -> None:
        """Lightning is as it was.

        Args:
            safely: Makes each step, and keeps what it raises from the others.
        """
        resuming, self._resuming = self._resuming, None
        for attached in (self.ledger, resuming):
            if attached is not None:
                safely(attached.detach)

    def _make_saver(self, place: Place, exchange: Exchange) -> Saver | None:
        settings = self._settings()
        if settings is None or self._trainer.state.fn != "fit" or self._trainer.fast_dev_run:
            return None
        strategy = self._trainer.strategy
        shard = OwnShard(strategy.model) if strategy.forward_communicates else None
        self.ledger = StepLedger(
            self._trainer,
            make_event=tensors.queue_event if self._is_on_gpu() else None,
            was_aborted=process_groups.was_aborted,
            parts=shard.parts if shard is not None else None,
        )
        return Saver(
            self._trainer,
            settings,
            self.ledger,
            weights=self._weights,
            rank=place.rank,
            world_size=place.world_size,
            exchange=lambda: exchange,
            shard=shard,
            last_save_s=lambda: self.last_checkpoint.took_s,
            last_path=lambda: self.last_checkpoint.path,
            left_behind=self._resuming.positions_in_files if self._resuming is not None else lambda ranks, step: {},
        )

    def _begin(self, cause: str, *, raised: bool) -> None:
        if self._saver is not None:
            self._saver.begin(cause, budget_s=self._save_s(), raised=raised, finally_do=self._requeue)

    def _save_s(self) -> float:
        """How long a save may take; on SIGTERM what is left of the time that the scheduler leaves."""
        settings, stop = self._settings(), self._stop()
        if settings is None or not (self._trainer.received_sigterm if stop is None else stop.is_asked):
            return _SAVE_S
        # Where Lightning handles the signal, nobody knows since when.
        asked_for_s = settings.grace_s / 2 if stop is None else stop.asked_for_s
        return max(settings.grace_s - asked_for_s - _LEAVES_S, 0.0)
