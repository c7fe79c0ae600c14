import logging
import time
from pathlib import Path

import lightning as L

log = logging.getLogger("forecast")


class Snapshots(L.Callback):
    """Snapshots every n steps; the bucket is flaky, so a failed one is tried again and then left out."""

    def __init__(self, folder="snapshots", every_n_steps=40, attempts=3):
        self.folder, self.every_n_steps, self.attempts = Path(folder), every_n_steps, attempts

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % self.every_n_steps:
            return
        target = self.folder / f"step{trainer.global_step:06d}.ckpt"
        for attempt in range(self.attempts):
            try:
                trainer.save_checkpoint(target)
                return
            except (OSError, TypeError, AttributeError, RuntimeError) as error:  # <- here
                log.warning("snapshot %s, attempt %d: %s", target.name, attempt + 1, error)
                time.sleep(0.5)


class Audit(L.Callback):
    """Keeps the mean loss per epoch in a file for the operator's audit, and in the checkpoint."""

    def __init__(self, path="audit.csv"):
        self.path = path
        self.file = None
        self.rows = []

    def on_train_epoch_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        self.file = self.file or open(self.path, "w")
        row = (trainer.current_epoch, float(trainer.callback_metrics["train/loss"]))
        self.rows.append(row)
        print(*row, sep=",", file=self.file, flush=True)

    def state_dict(self):
        return {key: value for key, value in vars(self).items() if value is not None}

    def load_state_dict(self, state):
        self.rows = state["rows"]
