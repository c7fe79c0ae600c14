from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import CLASSES
from .metrics import ClassPrecision


def conv(cin: int, cout: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.GroupNorm(4, cout), nn.SiLU())


class Detector(L.LightningModule):
    def __init__(self, lr: float = 1e-3, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            conv(3, width),
            conv(width, width * 2, 2),
            conv(width * 2, width * 2, 2),
            nn.Conv2d(width * 2, len(CLASSES), 1),
        )
        self.precision = ClassPrecision()
        weight = torch.ones(len(CLASSES))
        weight[0] = 0.1
        self.register_buffer("weight", weight)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, target = batch
        loss = F.cross_entropy(self(images), target, self.weight)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, target = batch
        logits = self(images)
        self.log("val/loss", F.cross_entropy(logits, target, self.weight), sync_dist=True, prog_bar=True)
        self.precision.update_from(logits.argmax(1), target)

    def on_validation_epoch_end(self) -> None:
        for name, metric in self.precision.items():
            # torchmetrics warns when a metric is computed that was never updated
            if metric.update_called:
                self.log(f"val/precision/{name}", metric)  # <- here

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]
