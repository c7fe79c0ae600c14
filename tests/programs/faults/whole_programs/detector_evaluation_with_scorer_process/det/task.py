import lightning as L
import torch
from torch import nn

from .evaluate import official_scores


class Detector(L.LightningModule):
    def __init__(self, boxes: int = 10, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 12, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 36, 64),
            nn.ReLU(),
            nn.Linear(64, 4 * boxes),
        )
        self.predictions = []

    def forward(self, image):
        centre, extent = self.trunk(image).view(len(image), -1, 4).split(2, -1)
        return torch.cat((0.5 + centre - extent / 2 - 0.1, 0.5 + centre + extent / 2 + 0.1), -1)

    def training_step(self, batch, batch_idx):
        image, truth = batch
        distance = (self(image) - truth[:, None]).abs().sum(-1)
        loss = distance.min(1).values.mean() + 0.1 * distance.mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.predictions.clear()

    def validation_step(self, batch, batch_idx):
        image, truth = batch
        for boxes, box in zip(self(image).tolist(), truth.tolist()):
            self.predictions.append((boxes, box))

    def on_validation_epoch_end(self):
        scores = official_scores(self.predictions)
        self.log("val/iou", scores.mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
