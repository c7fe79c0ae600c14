import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Tagger(L.LightningModule):
    def __init__(self, vocabulary=200, tags=8, width=32, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.words = nn.Embedding(vocabulary, width)
        self.context = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * width, tags)

    def training_step(self, batch, batch_idx):
        words, tags = batch
        hidden, _ = self.context(self.words(words))
        logits = self.tags(hidden).flatten(0, 1)
        loss = F.cross_entropy(logits, tags.flatten())
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", (logits.argmax(-1) == tags.flatten()).float().mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
