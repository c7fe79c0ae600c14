import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from . import ACCENTS
from .data import BANDS


class KeywordModel(L.LightningModule):
    def __init__(self, hidden: int = 32, lr: float = 1e-3, classes: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.norm = nn.LayerNorm(BANDS)
        self.encoder = nn.GRU(BANDS, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, banks):
        states, _ = self.encoder(self.norm(banks))
        return self.head(states.mean(dim=1))

    def training_step(self, batch, batch_idx):
        banks, words, _ = batch
        loss = F.cross_entropy(self(banks), words)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        banks, words, accents = batch
        logits = self(banks)
        wrong = (logits.argmax(dim=1) != words).float()
        self.log("val_loss", F.cross_entropy(logits, words), prog_bar=True, sync_dist=True)
        self.log("val_error", wrong.mean(), sync_dist=True)
        for number, accent in enumerate(ACCENTS):
            spoken = accents == number
            if spoken.any():
                size, error = int(spoken.sum()), wrong[spoken].mean()
                self.log(f"val_error/{accent}", error, batch_size=size, sync_dist=True)  # <- here

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
        return [optimizer], [scheduler]
