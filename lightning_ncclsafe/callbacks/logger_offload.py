"""The callback that takes loggers off the training thread."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ncclsafe._lightning import LightningModule, Logger, Trainer, refuse_other_trainer
from lightning_ncclsafe.loggers.offload import Offload
from lightning_ncclsafe.loggers.staging import default_staging_dir
from lightning_ncclsafe.loggers.starting import start_offload, writes_on_this_rank
from lightning_ncclsafe.reporter import say_own_failure
from lightning_ncclsafe.settings import OffloadSettings, Overflow, seconds

# Loggers that are offloaded, and for which Trainer, by identity; on every rank, so that all raise alike.
_taken: dict[int, int] = {}


class LoggerOffloadHooks:
    """Takes every logger of the Trainer off the training thread.

    Loggers keep their type, their paths and their methods. What they are given is copied when they are given it, is
    in local staging at most half a second later, and from there goes to the logger's own storage or server, many
    records in one write, by a thread that may wait for as long as it takes. Works with every strategy.

    Args:
        max_points_per_second: Most points of a tag that reach storage in a second. Of every ``3 /
            max_points_per_second`` seconds the smallest, the largest and the last point are kept. None: all of them,
            as long as the storage keeps up. Calls of ``logger.experiment`` are never thinned.
        overflow: What happens when one of the limits is reached. ``"thin"``: ever fewer points are kept, and media
            are dropped. ``"drop_oldest"``: the oldest that waits is dropped. ``"block"``: training waits for at most
            ``block_timeout``, then points are thinned. Hyperparameters are never dropped. All is counted.
        block_timeout: How long one call may wait with ``overflow="block"``: a ``timedelta``, or seconds.
        memory_limit_bytes: Most bytes that wait in memory, for each logger; 256 MiB by default.
        disk_limit_bytes: Most bytes that wait in local staging, for each logger; 1 GiB by default.
        finalize_timeout: How long the end of a run waits for storage: a ``timedelta``, or seconds.
        staging_dir: Folder of local staging, on a fast local disk. None: ``ncclsafe-<user id>/logs`` in the directory
            for temporary files.

    Raises:
        ValueError: If an argument is out of its range, or when a Trainer is started with a logger that another
            running Trainer offloads already.

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
        self._offloads: dict[int, list[tuple[Logger, Offload]]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts itself between the loggers and their callers."""
        refuse_other_trainer(self, trainer)
        loggers = list({id(logger): logger for logger in trainer.loggers}.values())
        for logger in loggers:
            if id(logger) in _taken:
                raise ValueError(_already_offloaded(logger, by_this_trainer=_taken[id(logger)] == id(trainer)))
        _taken.update((id(logger), id(trainer)) for logger in loggers)
        offloads = self._offloads[id(trainer)] = []
        for logger in loggers:
            if writes_on_this_rank(logger):
                try:
                    offloads.append((logger, start_offload(logger, self.settings)))
                except Exception as error:
                    say_own_failure(error, what=f"the offload of {type(logger).__name__}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The Trainer finalizes its loggers next, for the last time."""
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The Trainer finalizes its loggers next, for the last time."""
        self._end(trainer)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: a Trainer may be copied, or sent to another process."""
        return {**vars(self), "_offloads": {}}

    def _end(self, trainer: Trainer) -> None:
        if id(trainer) not in self._offloads:
            return
        for logger, offload in self._offloads.pop(id(trainer)):
            offload.ending = True
            # The Trainer has others by now, and finalizes only those.
            if not any(logger is other for other in trainer.loggers):
                offload.close()
        for taken in [taken for taken, owner in _taken.items() if owner == id(trainer)]:
            del _taken[taken]


def _already_offloaded(logger: Logger, *, by_this_trainer: bool) -> str:
    name = type(logger).__name__
    if by_this_trainer:
        return f"The {name} of this Trainer is offloaded by another LoggerOffload of it; give a Trainer one of them."
    return (
        f"The {name} of this Trainer is offloaded by another Trainer that still runs; give each Trainer a logger of "
        "its own."
    )
