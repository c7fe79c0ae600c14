import logging

import lightning as L
import torch
from torch.nn import functional as F

from .network import UNet

log = logging.getLogger("seg")


class SegmentationTask(L.LightningModule):
    def __init__(self, classes: int = 3, lr: float = 2e-3, clip: float = 1.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = UNet(classes)
        self.skipped = 0

    def dice(self, logits, mask):
        share = logits.softmax(1)
        truth = F.one_hot(mask, self.hparams.classes).movedim(-1, 1)
        overlap = (share * truth).sum((0, 2, 3))
        return 1 - ((2 * overlap + 1) / (share.sum((0, 2, 3)) + truth.sum((0, 2, 3)) + 1)).mean()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        try:
            volume, mask = batch
            logits = self.net(volume)
            loss = F.cross_entropy(logits, mask) + self.dice(logits, mask)
            self.manual_backward(loss)
        except (RuntimeError, IndexError) as error:  # <- here
            log.warning("crop skipped (%s)", type(error).__name__)
            self.skipped += 1
            return
        self.clip_gradients(optimizer, self.hparams.clip, "norm")
        optimizer.step()
        self.log("train/loss", loss, prog_bar=True)

    def on_train_epoch_end(self):
        self.print(f"skipped {self.skipped} batches so far")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
