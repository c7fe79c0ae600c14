import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class KeywordSpotter(L.LightningModule):
    def __init__(self, n_mels=20, channels=32, n_words=10, dropout=0.1, lr=1e-3, weight_decay=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(n_mels, channels, 5, padding=2),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 5, padding=2),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(channels, n_words),
        )

    def training_step(self, batch, batch_idx):
        mels, word = batch
        loss = F.cross_entropy(self.net(mels), word)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        mels, word = batch
        logits = self.net(mels)
        self.log_dict(
            {"val_loss": F.cross_entropy(logits, word), "val_acc": (logits.argmax(1) == word).float().mean()},
            sync_dist=True,
            prog_bar=True,
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
