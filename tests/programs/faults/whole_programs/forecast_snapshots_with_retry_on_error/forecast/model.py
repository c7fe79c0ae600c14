import lightning as L
import torch
from torch import nn


class Forecaster(L.LightningModule):
    def __init__(self, window: int = 48, horizon: int = 8, width: int = 64, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(window, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, horizon)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.smooth_l1_loss(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/mae", (self.net(x) - y).abs().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
