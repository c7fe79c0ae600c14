import lightning as L

from birdcall.features import FeatureCache


class RefreshFeatures(L.Callback):
    """Loads the next part of the recordings at the start of every epoch."""

    def __init__(self, per_epoch: int = 8):
        self.per_epoch = per_epoch
        self.cache = None

    def on_train_epoch_start(self, trainer, module):
        files = trainer.datamodule.files
        if self.cache is None:
            self.cache = FeatureCache(files)
        start = trainer.current_epoch * self.per_epoch % len(files)
        self.cache.refresh(files[start : start + self.per_epoch])
        trainer.datamodule.dataset.specs = self.cache.specs
