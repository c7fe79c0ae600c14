"""Just-in-time saving and resuming in one call of ``fit``, if a callback requests it.

The Trainer is duck-typed; Lightning is not imported here.
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
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.report.terminal import say_own_failure
from lightning_ncclsafe.settings import CheckpointSettings
from lightning_ncclsafe.sigterm.agreement import StopAgreement

# How long a save may take when the run is ended.
_SAVE_S = 10.0
# The part of the scheduler's grace time after which a main thread that has not stopped is no longer waited for.
_OVERDUE = 0.4
# The part of the grace time that processes need to end after a save.
_LEAVES_S = 3.0


class LastCheckpoint:
    """The last checkpoint that was saved in this call elsewhere, for instance by ``ModelCheckpoint``.

    Attributes:
        path: Its path; empty if there was none.
        took_s: How long the save took on all ranks, seconds.
    """

    def __init__(self) -> None:
        self.path = ""
        self.took_s = 0.0
        self._begun: tuple[str, float] | None = None

    def begin(self, path: Any) -> None:
        """Called before a checkpoint is written."""
        self._begun = str(path), time.monotonic()

    def end(self) -> None:
        """Called when all ranks have saved it."""
        if self._begun is not None:
            self.path, self.took_s = self._begun[0], time.monotonic() - self._begun[1]
            self._begun = None


class SavedAtEnd:
    """Connects the saver of one call, its ledger, and resuming.

    Args:
        settings: Gives what the user has set; None if no callback requests it.
        stop: Gives the agreement on where to stop on SIGTERM; None if there is none.
        requeue: Makes the scheduler queue the job again, if wanted; called once the state is saved.

    Attributes:
        ledger: Knows which weights belong to which counters; None if no callback requests it.
        last_checkpoint: The last checkpoint that was saved elsewhere.
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
        """All ranks have joined: prepares to give Lightning its checkpoint."""
        self._connected = place, exchange
        settings = self._settings()
        if settings is None:
            return
        resuming = Resuming(
            self._trainer,
            settings,
            exchange,
            rank=place.rank,
            world_size=place.world_size,
            local_ranks=place.ranks_here,
        )
        try:
            resuming.attach()
        except Exception as error:  # the run starts from scratch
            say_own_failure(error, what="resuming from a checkpoint")
        else:
            self._resuming = resuming

    def set_up(self) -> None:
        """Called when Lightning has restored a checkpoint, and is about to start its loops."""
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
        """Called regularly while the run continues."""
        settings = self._settings() if self._saver is not None else None
        stop = self._stop()
        if stop and settings and stop.is_asked and stop.asked_for_s > settings.grace_s * _OVERDUE:
            # The main thread does not reach its next batch in time: the present state is saved from another thread.
            self._begin("SIGTERM", raised=False)

    def save(self, cause: str, raised: bool) -> Callable[[], None]:
        """See :data:`~lightning_ncclsafe.guard.after_verdict.Save`; does nothing if no callback requests it."""
        self._begin(cause or "SIGTERM", raised=raised)
        return self._saver.wait if self._saver is not None else lambda: None

    def detach(self, safely: Callable[[Callable[[], None]], object]) -> None:
        """Restores Lightning's methods; ``safely`` runs each step."""
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
            exchange=exchange,
            shard=shard,
            last_save_s=lambda: self.last_checkpoint.took_s,
            last_path=lambda: self.last_checkpoint.path,
            left_behind=self._resuming.positions_in_files if self._resuming is not None else lambda ranks, step: {},
        )

    def _begin(self, cause: str, *, raised: bool) -> None:
        if self._saver is not None:
            self._saver.begin(cause, budget_s=self._save_s(), raised=raised, finally_do=self._requeue)

    def _save_s(self) -> float:
        """How long a save may take; on SIGTERM, within the rest of the scheduler's grace time."""
        settings, stop = self._settings(), self._stop()
        if settings is None or not (self._trainer.received_sigterm if stop is None else stop.is_asked):
            return _SAVE_S
        # If Lightning handles the signal, it is unknown when it came.
        asked_for_s = settings.grace_s / 2 if stop is None else stop.asked_for_s
        return max(settings.grace_s - asked_for_s - _LEAVES_S, 0.0)
