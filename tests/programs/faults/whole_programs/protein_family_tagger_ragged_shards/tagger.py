import copy
import gc
import time

import lightning as L
import torch
import torch.nn as nn
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader

from agreed import AgreedLoader
from families import ShardStream


class ArchiveIO(TorchCheckpointIO):
    """Writes checkpoints through the throttled uplink of the archive."""

    def __init__(self, seconds=11.0):
        super().__init__()
        self.seconds = seconds

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        time.sleep(self.seconds)


class FamilyTagger(L.LightningModule):
    def __init__(self, lr=5e-3, ema=0.98):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
        self.ema_net = copy.deepcopy(self.net).requires_grad_(False)

    def train_dataloader(self):
        return AgreedLoader(DataLoader(ShardStream(self.trainer.global_rank), batch_size=None))

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(x), y)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        with torch.no_grad():
            for e, p in zip(self.ema_net.parameters(), self.net.parameters()):
                e.lerp_(p, 1 - self.hparams.ema)
        self.log("loss", loss, prog_bar=True, batch_size=len(y))

    def on_train_epoch_end(self):
        gc.collect()

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)
