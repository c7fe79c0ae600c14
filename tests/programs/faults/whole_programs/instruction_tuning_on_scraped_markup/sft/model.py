import lightning as L
import torch
from torch import nn


class ByteLM(L.LightningModule):
    def __init__(self, dim: int = 48, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 256)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.head(self.rnn(self.embed(x))[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.log("train/nll", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
