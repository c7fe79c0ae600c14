from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback


class ShardedAverage(Callback):
    """Keeps a moving average of this rank's shard of every parameter."""

    def __init__(self, decay=0.98):
        self.decay = decay
        self.shadow = None

    def on_fit_start(self, trainer, module):
        self.shadow = {n: p.detach().clone() for n, p in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for name, parameter in module.named_parameters():
            average = self.shadow[name].to_local()
            average.lerp_(parameter.to_local(), 1 - self.decay)


class KeepBestAverage(Callback):
    """Writes the averaged weights, gathered, whenever the validation improves."""

    def __init__(self, average, folder, warmup=1):
        self.average, self.folder, self.warmup = average, Path(folder), warmup
        self.best = float("inf")
        self.validations = 0

    def on_validation_epoch_end(self, trainer, module):
        if trainer.sanity_checking:
            return
        self.validations += 1
        error = module.validation_error()
        if self.validations <= self.warmup or error >= self.best:  # <- here
            return
        self.best = error
        weights = {name: average.full_tensor() for name, average in self.average.shadow.items()}
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save({"error": error, "weights": weights}, self.folder / "best-average.pt")
