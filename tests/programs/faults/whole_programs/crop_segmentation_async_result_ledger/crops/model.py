import lightning as L
import numpy as np
import torch
from torch import nn


class CropSegmenter(L.LightningModule):
    def __init__(self, width: int = 24, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv2d(4, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 4, 1))
        self.iou_history = []

    def training_step(self, batch, batch_idx):
        bands, label = batch
        loss = nn.functional.cross_entropy(self.net(bands), label)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        bands, label = batch
        logits = self.net(bands)
        self.log("val/loss", nn.functional.cross_entropy(logits, label), sync_dist=True)
        found = logits.argmax(1)
        iou = [((found == c) & (label == c)).sum() / ((found == c) | (label == c)).sum().clamp(min=1) for c in range(4)]
        self.iou_history.append(np.array(torch.stack(iou)))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
