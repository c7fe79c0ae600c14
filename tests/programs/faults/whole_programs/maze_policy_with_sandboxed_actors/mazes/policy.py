from pathlib import Path

import lightning as L
import torch
from torch import nn

from .actors import Actors
from .levels import design


class Policy(L.LightningModule):
    def __init__(self, root="levels", batch_size=16, cpu_seconds=4, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4))
        self.actors = None

    def prepare_data(self):
        design(Path(self.hparams.root))

    def on_fit_start(self):
        path = Path(self.hparams.root) / f"set{self.global_rank % 2}.json"
        self.actors = Actors(path, self.global_rank, self.hparams.batch_size, self.hparams.cpu_seconds)

    def training_step(self, batch, batch_idx):
        views, moves = map(torch.from_numpy, self.actors.rollout())
        logits = self.net(views)
        self.log("agreement", (logits.argmax(1) == moves).float().mean(), prog_bar=True)
        return nn.functional.cross_entropy(logits, moves)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
