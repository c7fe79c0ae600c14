import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Seq2Seq(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source, target):
        _, state = self.encoder(self.source(source))
        hidden, _ = self.decoder(self.target(target), state)
        return self.head(hidden)


class Translator(L.LightningModule):
    def __init__(self, vocabulary=120, width=64, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = Seq2Seq(vocabulary, width)

    def loss(self, batch):
        source, target = batch
        start = torch.ones_like(target[:, :1])
        logits = self.model(source, torch.cat([start, target[:, :-1]], 1))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
