import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class TinyCodeLM(L.LightningModule):
    def __init__(self, vocab=128, dim=48, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def loss(self, ids):
        h, _ = self.rnn(self.embed(ids[:, :-1]))
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
