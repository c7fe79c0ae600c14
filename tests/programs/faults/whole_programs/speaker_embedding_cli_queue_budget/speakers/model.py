import lightning as L
import torch
from torch import nn


class StatsPool(nn.Module):
    def forward(self, x):
        return torch.cat([x.mean(-1), x.std(-1)], 1)


class SpeakerNet(L.LightningModule):
    def __init__(self, speakers: int = 50, width: int = 96, scale: float = 16.0, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.frontend = nn.Sequential(
            nn.Conv1d(40, width, 5),
            nn.ReLU(),
            nn.GroupNorm(4, width),
            nn.Conv1d(width, width, 3, dilation=2),
            nn.ReLU(),
            nn.GroupNorm(4, width),
        )
        self.embed = nn.Sequential(StatsPool(), nn.Linear(2 * width, 64))
        self.classes = nn.Parameter(torch.randn(speakers, 64))

    def logits(self, x):
        e = nn.functional.normalize(self.embed(self.frontend(x)))
        return self.hparams.scale * e @ nn.functional.normalize(self.classes).T

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("train/aam", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
