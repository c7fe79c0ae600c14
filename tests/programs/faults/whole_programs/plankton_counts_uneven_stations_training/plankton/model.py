import copy
import time
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from plankton.stations import Stations, Together, export


class CountModel(L.LightningModule):
    def __init__(self, root: str, batch_size: int = 8, mount_seconds: float = 14.0, decay: float = 0.99):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(23, 64), nn.ReLU(), nn.Linear(64, 1))
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def prepare_data(self):
        export(Path(self.hparams.root))

    def training_step(self, batch, batch_idx):
        x, y = batch
        time.sleep(0.01)
        loss = nn.functional.mse_loss(self.net(x).squeeze(-1), y)
        self.log("mse", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.ema.parameters(), self.net.parameters()):
            slow.lerp_(fast, 1 - self.hparams.decay)

    def on_train_epoch_end(self):
        grid = torch.rand(4000, 23)
        until = time.monotonic() + 5
        draws = []
        while time.monotonic() < until:
            draws.append(self.ema(grid + 0.01 * torch.randn_like(grid)).mean())
            time.sleep(0.05)
        self.log("ema/spread", torch.stack(draws).std(), sync_dist=True)

    def train_dataloader(self):
        h = self.hparams
        return Together(DataLoader(Stations(Path(h.root), h.mount_seconds), batch_size=h.batch_size))

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 1e-3)
