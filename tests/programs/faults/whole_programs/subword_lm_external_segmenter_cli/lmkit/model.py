import lightning as L
import torch
from torch import nn


class GruLM(L.LightningModule):
    def __init__(self, width: int = 48, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(128, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def training_step(self, batch, batch_idx):
        hidden, _ = self.rnn(self.embed(batch[:, :-1]))
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
