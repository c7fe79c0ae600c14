"""Keeps the best model of a run under one well-known name, which the dashboard reads."""

import logging
import time
from pathlib import Path

import lightning as L

log = logging.getLogger(__name__)


class BestSnapshot(L.Callback):
    def __init__(self, monitor: str, path: str = "snapshots/best/model.ckpt", attempts: int = 3, pause: float = 0.5):
        self.monitor, self.path = monitor, Path(path)
        self.attempts, self.pause = attempts, pause
        self.best = float("inf")

    def _save(self, trainer) -> bool:
        for attempt in range(1, self.attempts + 1):
            try:
                trainer.save_checkpoint(self.path, weights_only=True)  # <- here
                return True
            except OSError as error:
                log.info("attempt %d to save %s: %s", attempt, self.path, error)
                time.sleep(self.pause)
        return False

    def on_train_epoch_end(self, trainer, pl_module):
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None and value < self.best and self._save(trainer):
            self.best = value.item()
