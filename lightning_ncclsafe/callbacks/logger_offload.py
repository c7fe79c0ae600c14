"""The callback that moves loggers off the training thread."""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ncclsafe._lightning import LightningModule, Logger, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.callbacks.batch_hooks import without_batch_hooks
from lightning_ncclsafe.loggers.offload import Offload
from lightning_ncclsafe.loggers.staging import default_staging_dir
from lightning_ncclsafe.loggers.starting import CallTimer, goes_to_storage, is_mock, start_offload, writes_on_this_rank
from lightning_ncclsafe.report.terminal import say_own_failure
from lightning_ncclsafe.settings import OffloadSettings, Overflow, seconds

# Loggers that are offloaded, or may be, by identity, with the identity of the Trainer; another one leaves them alone.
_taken: dict[int, int] = {}


@without_batch_hooks
class LoggerOffloadHooks:
    """Moves the Trainer's loggers off the training thread.

    Loggers keep their type, paths and methods. Whatever they are given is copied at once, is in local staging at most
    half a second later, and from there goes to the logger's own storage or server, many records in one write, from a
    thread that may wait as long as it takes. Works with every strategy.

    ``TensorBoardLogger``, ``CSVLogger`` and ``MLFlowLogger`` are offloaded from the start. Any other logger may keep
    its points where the program reads them, so it is called in place until three calls in a row have each waited 50 ms;
    a mock is always called in place. Before this program opens a logger's files, everything logged so far is delivered.

    Args:
        max_points_per_second: How many points of a tag reach storage per second. Of every ``3 /
            max_points_per_second`` seconds, the smallest, the largest and the last point are kept. None: all points,
            as long as the storage keeps up. Calls of ``logger.experiment`` are never thinned.
        overflow: What happens when one of the limits is reached. ``"thin"``: ever fewer points are kept, and media
            are dropped. ``"drop_oldest"``: the oldest waiting record is dropped. ``"block"``: training waits for at
            most ``block_timeout``, then points are thinned. Hyperparameters are never dropped. Everything is counted.
        block_timeout: How long one call may wait with ``overflow="block"``: a ``timedelta``, or seconds.
        memory_limit_bytes: How many bytes may wait in memory, for each logger; 256 MiB by default.
        disk_limit_bytes: How many bytes may wait in local staging, for each logger; 1 GiB by default.
        finalize_timeout: How long the end of a run waits for storage: a ``timedelta``, or seconds.
        staging_dir: Folder of local staging, on a fast local disk. None: ``ncclsafe-<user id>/logs`` in the directory
            for temporary files.

    Raises:
        ValueError: If an argument is out of range, or if a Trainer has two of these callbacks.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), logger=TensorBoardLogger("logs"), callbacks=[LoggerOffload()])
    """

    def __init__(
        self,
        *,
        max_points_per_second: float | None = None,
        overflow: Overflow = "thin",
        block_timeout: float | timedelta = 10.0,
        memory_limit_bytes: int = 256 << 20,
        disk_limit_bytes: int = 1 << 30,
        finalize_timeout: float | timedelta = 30.0,
        staging_dir: str | Path | None = None,
    ) -> None:
        self.settings = OffloadSettings(
            max_points_per_s=max_points_per_second,
            overflow=overflow,
            block_s=seconds("block_timeout", block_timeout),
            memory_limit_bytes=memory_limit_bytes,
            disk_limit_bytes=disk_limit_bytes,
            finalize_s=seconds("finalize_timeout", finalize_timeout),
            staging_dir=Path(staging_dir) if staging_dir is not None else default_staging_dir(),
        )
        # By the identity of the Trainer: one may run within another's hook.
        self._parts: dict[int, _Parts] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts itself between the loggers and their callers."""
        refuse_other_trainer(self, trainer)
        refuse_second(LoggerOffloadHooks, trainer)
        # A run that ended without a teardown still has its loggers replaced.
        self._end(trainer, for_good=True)
        parts = self._parts[id(trainer)] = _Parts()
        for logger in {id(logger): logger for logger in trainer.loggers}.values():
            if id(logger) in _taken or is_mock(logger) or not writes_on_this_rank(logger):
                continue
            _taken[id(logger)] = id(trainer)
            if goes_to_storage(logger):
                self._start(logger, parts.offloads)
            else:
                parts.timers.append(CallTimer(logger, partial(self._start, logger, parts.slow)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Moves this callback to the first place, once there is something to catch up with."""
        parts = self._parts.get(id(trainer))
        # It moves before the callback that is being called: none is called twice, and none is left out.
        callbacks: list[Any] = getattr(trainer, "callbacks", [])
        if parts and parts.slow and callbacks[:1] != [self] and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    def _catch_up(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Delivers what loggers were given before user code can read it from their memory."""
        if id(trainer) in self._parts:
            for _logger, offload in self._parts[id(trainer)].slow:
                offload.catch_up()

    on_fit_start = on_train_start = on_train_epoch_start = on_train_epoch_end = on_train_end = on_fit_end = _catch_up
    on_sanity_check_start = on_sanity_check_end = on_save_checkpoint = _catch_up
    on_validation_start = on_validation_epoch_start = on_validation_epoch_end = on_validation_end = _catch_up
    on_test_start = on_test_epoch_start = on_test_epoch_end = on_test_end = _catch_up
    on_predict_start = on_predict_epoch_start = on_predict_epoch_end = on_predict_end = _catch_up

    def _finish(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """The Trainer finalizes its loggers next, for the last time."""
        self._catch_up(trainer)
        self._end(trainer)

    teardown = on_exception = _finish

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: a Trainer may be copied, or sent to another one."""
        return {**vars(self), "_parts": {}}

    def _start(self, logger: Logger, into: list[tuple[Logger, Offload]]) -> None:
        try:
            into.append((logger, start_offload(logger, self.settings)))
        except Exception as error:
            say_own_failure(error, what=f"the offload of {type(logger).__name__}")

    def _end(self, trainer: Trainer, *, for_good: bool = False) -> None:
        parts = self._parts.pop(id(trainer), _Parts())
        for timer in parts.timers:
            timer.end()
        for logger, offload in [*parts.offloads, *parts.slow]:
            offload.ending = True
            # The Trainer has others by now, and finalizes only those.
            if for_good or not any(logger is other for other in trainer.loggers):
                offload.close()
        for taken in [taken for taken, owner in _taken.items() if owner == id(trainer)]:
            del _taken[taken]


@dataclass(slots=True)
class _Parts:
    """What was put between the loggers of one Trainer and their callers."""

    offloads: list[tuple[Logger, Offload]] = field(default_factory=list)
    timers: list[CallTimer] = field(default_factory=list)
    # Offloads of loggers that have proved slow, and may be read from memory.
    slow: list[tuple[Logger, Offload]] = field(default_factory=list)
