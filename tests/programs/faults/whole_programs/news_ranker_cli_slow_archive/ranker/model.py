import lightning as L
import torch
from torch import nn


class Ranker(L.LightningModule):
    def __init__(self, width: int = 512, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def _loss(self, batch):
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self.net(x).squeeze(-1), y)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train/bce", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/bce", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
