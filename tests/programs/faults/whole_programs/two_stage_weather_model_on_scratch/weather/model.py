import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class Forecaster(L.LightningModule):
    def __init__(self, width=16, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(2, width, 3, padding=1, padding_mode="circular"),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="circular"),
            nn.GELU(),
            nn.Conv2d(width, 2, 1),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(x + self.net(x), y)
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/mse", F.mse_loss(x + self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
