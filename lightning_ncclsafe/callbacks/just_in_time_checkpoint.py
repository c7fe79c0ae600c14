"""The callback that saves a run as it ends."""

import os
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.callbacks.batch_hooks import without_batch_hooks
from lightning_ncclsafe.checkpoints.folder import KEY
from lightning_ncclsafe.settings import CheckpointSettings, seconds
from lightning_ncclsafe.strategies.guarded import guards


@without_batch_hooks
class JustInTimeCheckpointHooks:
    """Saves a run as it ends, from ranks that are still healthy, and resumes from there at the next start.

    While nothing goes wrong, it saves nothing and costs next to nothing. When a run ends because ranks wait in vain, or
    one has died or raised, a rank with an intact model and optimizers writes the state after the last completed
    optimizer step, from a thread beside the one that waits, without a collective. If the model is sharded, each
    rank writes its shard. On SIGTERM, all ranks stop before the same batch and save then. A state that cannot be proven
    consistent is not saved, and one line says why.

    The checkpoint, ``just-in-time-epoch=…-step=….ckpt``, is one that stock Lightning loads with
    ``trainer.fit(ckpt_path=…)``; for a sharded model it is a folder. It is written under another name, read back and
    then renamed; it never overwrites another checkpoint.

    Args:
        dirpath: The local or shared folder of these checkpoints, relative to the working directory at the start.
        resume: Whether ``fit`` without a ``ckpt_path`` resumes from the newest complete checkpoint, of this callback or
            of a ``ModelCheckpoint``. If there is none, as at the first start, training begins from scratch.
        keep: How many of these checkpoints are kept; older ones are removed once a newer one is complete.
        grace: How much time the scheduler leaves between SIGTERM, or SLURM's signal, and the end of the processes: a
            ``timedelta``, or seconds. A checkpoint that would not fit is not begun.

    Attributes:
        dirpath: The folder.
        resume: As given.

    Raises:
        ValueError: If ``dirpath`` is remote, ``keep`` is not a whole number of at least 1 or ``grace`` is not longer
            than 0, or if a Trainer has two of these callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[JustInTimeCheckpoint("checkpoints", resume=True)])
    """

    def __init__(
        self,
        dirpath: str | Path = "checkpoints",
        *,
        resume: bool = False,
        keep: int = 2,
        grace: timedelta | float = 30.0,
    ) -> None:
        if "://" in os.fspath(dirpath):
            raise ValueError(f"dirpath={dirpath!r} is remote; it must be a local or mounted folder.")
        self.dirpath = Path(dirpath).absolute()
        self.resume = resume
        self.settings = CheckpointSettings(
            dirpath=self.dirpath, resume=resume, keep=keep, grace_s=seconds("grace", grace), run=uuid.uuid4().hex
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Goes on as the run whose checkpoint it is, so that this one is among those that are kept."""
        run = checkpoint.get(KEY, {}).get("run")
        self.settings = replace(self.settings, run=run or self.settings.run)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy has the guard, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(JustInTimeCheckpointHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                "JustInTimeCheckpoint needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )
