import lightning as L
import torch
from torch import nn

from turbines.series import loader


class Forecaster(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 2e-3, batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(48, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 6)
        )

    def training_step(self, batch, batch_idx):
        past, future = batch
        loss = nn.functional.mse_loss(self.net(past), future)
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        past, future = batch
        self.log("val/mae", (self.net(past) - future).abs().mean(), sync_dist=True, prog_bar=True)

    def train_dataloader(self):
        return loader(0, 60, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return loader(1, 24, self.hparams.batch_size)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)
