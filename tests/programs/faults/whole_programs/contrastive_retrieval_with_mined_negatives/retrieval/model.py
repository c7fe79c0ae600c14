import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class DualEncoder(L.LightningModule):
    def __init__(self, dim: int = 32, hidden: int = 64, margin: float = 0.2, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.query_tower = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.passage_tower = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def encode(self, tower, x):
        return F.normalize(tower(x), dim=-1)

    def loss(self, batch):
        q, p, n = batch
        q, p, n = (
            self.encode(self.query_tower, q),
            self.encode(self.passage_tower, p),
            self.encode(self.passage_tower, n),
        )
        return F.relu(self.hparams.margin - (q * p).sum(-1) + (q * n).sum(-1)).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
