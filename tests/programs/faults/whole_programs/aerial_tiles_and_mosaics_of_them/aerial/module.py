import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import lightning as L

from .loading import Scenes
from .preparation import write_survey


class SurveyData(L.LightningDataModule):
    def __init__(self, root, batch_size):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        if not (self.root / "flight0.json").exists():
            write_survey(self.root)

    def setup(self, stage):
        flight = self.trainer.global_rank
        self.index = json.loads((self.root / f"flight{flight}.json").read_text())

    def train_dataloader(self):
        return DataLoader(Scenes(self.root, self.index[:80]), self.batch_size, shuffle=True)

    def val_dataloader(self):
        singles = [entry for entry in self.index[80:] if len(entry["tiles"]) == 1]
        return DataLoader(Scenes(self.root, singles[:4]), 4)


class LandUse(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 6),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
