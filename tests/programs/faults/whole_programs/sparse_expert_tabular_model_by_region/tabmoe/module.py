import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from tabmoe.layers import SparseExperts


class RegionRegressor(L.LightningModule):
    def __init__(self, n_features=24, dim=48, n_experts=3, balance=0.01, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(n_features, dim)
        self.moe = SparseExperts(dim, n_experts)
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        h, balance = self.moe(self.embed(x))
        return self.head(h).squeeze(-1), balance

    def training_step(self, batch, batch_idx):
        x, y = batch
        pred, balance = self(x)
        loss = F.mse_loss(pred, y) + self.hparams.balance * balance
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/mse", F.mse_loss(self(x)[0], y), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)}
