import lightning as L
import torch
from torch import nn


class PropertyRegressor(L.LightningModule):
    def __init__(self, n_tokens: int, width: int = 64, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(n_tokens + 1, width, padding_idx=0)
        self.conv = nn.Conv1d(width, width, 5, padding=2)
        self.out = nn.Linear(width, 1)

    def forward(self, ids):
        h = self.conv(self.embed(ids).transpose(1, 2)).relu()
        return self.out(h.mean(-1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        ids, target = batch
        loss = nn.functional.mse_loss(self(ids), target)
        self.log("train/mse", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        ids, target = batch
        self.log("val/mse", nn.functional.mse_loss(self(ids), target), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
