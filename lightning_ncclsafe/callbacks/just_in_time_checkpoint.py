"""The callback that saves a run at the moment at which it is ended."""

import os
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.checkpoints.folder import KEY
from lightning_ncclsafe.settings import CheckpointSettings, seconds
from lightning_ncclsafe.strategies.guarded import guards


class JustInTimeCheckpointHooks:
    """Saves a run when it is being ended, from ranks that are still there, and goes on from there at the next start.

    Nothing is saved, and next to nothing is done, while nothing happens. When a run is being ended, as ranks wait in
    vain, one has died or raised, a rank whose model and optimizers are whole writes the state after the last completed
    optimizer step, from a thread beside the one that waits, without a collective. Where a model is split among ranks,
    each writes its part. On SIGTERM all ranks stop before the same batch and save then. What cannot be proven to belong
    together is not saved, and one line says why.

    The checkpoint, ``just-in-time-epoch=…-step=….ckpt``, is one that ``trainer.fit(ckpt_path=…)`` of stock Lightning
    loads; of a model that is split it is a folder. It is written beside, read back and then given its name; no other
    checkpoint is ever written over.

    Args:
        dirpath: The local or shared folder of these checkpoints; relative to where the program was started.
        resume: Whether ``fit`` without a ``ckpt_path`` goes on from the newest checkpoint that is whole, of this
            callback or of a ``ModelCheckpoint``. Where there is none, as at the first start, training begins anew.
        keep: How many of these checkpoints are kept; older ones are removed once a newer one is whole.
        grace: What the scheduler leaves between SIGTERM, or the signal of SLURM, and the end of the processes: a
            ``timedelta``, or seconds. A checkpoint that would not fit is not begun.

    Attributes:
        dirpath: The folder.
        resume: As given.

    Raises:
        ValueError: If ``dirpath`` is remote, ``keep`` no whole number of at least 1 or ``grace`` not longer than 0, or
            when a Trainer has two of these callbacks.
        TypeError: When a Trainer is run with a strategy that ends no run.

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
        """Checks that the strategy is one that ends runs, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(JustInTimeCheckpointHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                f"JustInTimeCheckpoint needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )


# A hook that cannot be called is passed over by Lightning, and costs nothing: see the callback that times collectives.
for _hook in ("batch_start", "batch_end"):
    setattr(JustInTimeCheckpointHooks, f"on_train_{_hook}", None)
for _hook in ("before_zero_grad", "before_backward", "after_backward", "before_optimizer_step"):
    setattr(JustInTimeCheckpointHooks, f"on_{_hook}", None)
