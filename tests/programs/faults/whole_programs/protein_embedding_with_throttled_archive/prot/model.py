import lightning as L
import torch
from torch import nn


class ProfileNet(L.LightningModule):
    def __init__(self, dim=96, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(20, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 1)

    def training_step(self, batch, batch_idx):
        ids, target = batch
        loss = (self.head(self.rnn(self.embed(ids))[0]).squeeze(-1) - target).pow(2).mean()
        self.log("mse", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
