"""Training with per-rank telemetry: every rank streams its step times into a named pipe, a collector merges them."""

import argparse
import os
import subprocess
import time
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Telemetry(Callback):
    """`telemetry.csv` is what the cluster's dashboard reads. Pipes keep the ranks from writing to one file."""

    def __init__(self, directory="telemetry"):
        self.directory = Path(directory)
        self.pipe = None
        self.collector = None
        self.last = None

    def _path(self, rank):
        return self.directory / f"rank{rank}.pipe"

    def setup(self, trainer, pl_module, stage):
        if trainer.is_global_zero:
            self.directory.mkdir(exist_ok=True)
            for rank in range(trainer.world_size):
                if not self._path(rank).exists():
                    os.mkfifo(self._path(rank))
            sources = [str(self._path(r)) for r in range(trainer.world_size)]
            out = open(self.directory / "telemetry.csv", "wb")
            self.collector = subprocess.Popen(["cat", *sources], stdout=out)
        trainer.strategy.barrier("telemetry")

    def on_train_start(self, trainer, pl_module):
        self.pipe = open(self._path(trainer.global_rank), "w", buffering=1)  # <- here
        self.last = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.pipe.write(f"{trainer.global_rank},{trainer.global_step},{now - self.last:.6f}\n")
        self.last = now

    def on_train_end(self, trainer, pl_module):
        self.pipe.close()
        if self.collector is not None:
            self.collector.wait()


class Sines(Dataset):
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        phase = torch.rand(n, 1, generator=g) * 6.28
        t = torch.linspace(0, 12, 61)[None]
        self.x = torch.sin(t + phase) + 0.05 * torch.randn(n, 61, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i, :60], self.x[i, 60:]


class Forecaster(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(60, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--telemetry", default="telemetry")
    ns = ap.parse_args()
    L.seed_everything(4)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=ns.epochs, callbacks=[Telemetry(ns.telemetry)]
    )
    trainer.fit(Forecaster(), DataLoader(Sines(2000), batch_size=16, shuffle=True))
