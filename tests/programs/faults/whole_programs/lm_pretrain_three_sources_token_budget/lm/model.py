import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from .corpus import VOCAB


class GRULanguageModel(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        hidden, _ = self.gru(self.embed(ids))
        return self.head(hidden)

    def training_step(self, ids, batch_idx):
        logits = self(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
