"""Named snapshots in the middle of an epoch, for the sweep's comparison page."""

import logging
from pathlib import Path

import lightning as L

log = logging.getLogger("sweep")


class Snapshots(L.Callback):
    """A lost snapshot must never cost a trial, so errors of the share are only reported."""

    def __init__(self, folder: str, trial: str, every: int) -> None:
        self.folder, self.trial, self.every = Path(folder), trial, every
        self.lost = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args) -> None:
        step = trainer.global_step
        if step == 0 or step % self.every:
            return
        path = self.folder / f"{self.trial}-step{step:06d}.ckpt"
        try:
            trainer.save_checkpoint(path, weights_only=True)  # <- here
        except OSError as error:
            self.lost += 1
            log.warning("snapshot %s lost: %s", path.name[:40], error)
