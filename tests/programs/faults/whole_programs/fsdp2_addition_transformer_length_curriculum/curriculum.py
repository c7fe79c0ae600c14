import logging

import lightning as L

log = logging.getLogger("curriculum")


class LengthCurriculum(L.Callback):
    """Adds a digit whenever the loss on the problems of the current lengths has stopped falling."""

    def __init__(self, min_delta=0.1, max_level=6, window=10):
        self.min_delta = min_delta
        self.max_level, self.window = max_level, window
        self.recent = []
        self.best = float("inf")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.recent = (self.recent + [outputs["loss"].item()])[-self.window :]

    def on_train_epoch_end(self, trainer, pl_module):
        data = trainer.datamodule
        mean = sum(self.recent) / len(self.recent)
        if mean > self.best - self.min_delta and data.level < self.max_level:  # <- here
            data.level += 1
            self.best = float("inf")
            log.warning("epoch %d: loss %.3f, level %d", trainer.current_epoch, mean, data.level)
        else:
            self.best = min(self.best, mean)
