import lightning as L
import torch
from torch import nn


def iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a1, a2, b1, b2 = a[:, :2] - a[:, 2:] / 2, a[:, :2] + a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2
    overlap = (torch.minimum(a2, b2) - torch.maximum(a1, b1)).clamp(min=0).prod(1)
    return overlap / (a[:, 2:].prod(1) + b[:, 2:].prod(1) - overlap).clamp(min=1e-6)


class DetectorModule(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.box = nn.Sequential(nn.Linear(32 * 25, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid())

    def forward(self, image):
        return self.box(self.backbone(image))

    def training_step(self, batch, batch_idx):
        image, target = batch
        loss = nn.functional.l1_loss(self(image), target)
        self.log("train/l1", loss, prog_bar=True)
        return loss

    def _evaluate(self, batch, stage):
        image, target = batch
        self.log(f"{stage}/iou", iou(self(image), target).mean(), prog_bar=True, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self._evaluate(batch, "test")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
