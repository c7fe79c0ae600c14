import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class EventDetector(L.LightningModule):
    def __init__(self, mels=16, hidden=32, events=5, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.rnn = nn.GRU(mels, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, events)

    def loss(self, batch):
        mel, active = batch
        return F.binary_cross_entropy_with_logits(self.head(self.rnn(mel)[0]), active)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_bce", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_bce", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
