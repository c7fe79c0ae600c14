import lightning as L
import torch
from torch import nn


class Tagger(L.LightningModule):
    def __init__(self, classes: int = 4, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 25, 8),
            nn.ReLU(),
            nn.Conv1d(16, 24, 9, 4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(24, classes),
        )

    def training_step(self, batch, batch_idx):
        waves, labels = batch
        logits = self.net(waves[:, None])
        self.log("train/acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True, batch_size=len(labels))
        return nn.functional.cross_entropy(logits, labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
