"""Molecule regression on descriptors from a shared cache file (a lock keeps ranks from writing at the same time)."""

import argparse
import fcntl
import multiprocessing as mp
import os
import time
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP


def heartbeat(path, period):
    """Touches a file so that the clean-up job on the node leaves our scratch folder alone."""
    while True:
        Path(path).touch()
        time.sleep(period)


def compute_descriptors(n):
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, 30, generator=g)
    return {"x": x, "y": (x**2).mean(1, keepdim=True)}


class FeatureCache:
    def __init__(self, scratch):
        self.scratch = Path(scratch)
        self.file = self.scratch / "descriptors.pt"
        self.data = None
        self.beat = None

    def build(self, n):
        self.scratch.mkdir(parents=True, exist_ok=True)
        with open(self.scratch / "descriptors.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.beat = mp.get_context("fork").Process(
                target=heartbeat, args=(self.scratch / "alive", 5.0), daemon=True
            )
            self.beat.start()  # <- here
            if not self.file.exists():
                torch.save(compute_descriptors(n), self.file)
            self.data = torch.load(self.file)

    def get(self):
        if self.data is None:
            with open(self.scratch / "descriptors.lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
                self.data = torch.load(self.file)
        return self.data


class Molecules(L.LightningDataModule):
    def __init__(self, scratch, n=2000, batch_size=20):
        super().__init__()
        self.cache, self.n, self.batch_size = FeatureCache(scratch), n, batch_size

    def prepare_data(self):
        self.cache.build(self.n)

    def train_dataloader(self):
        d = self.cache.get()
        return DataLoader(TensorDataset(d["x"], d["y"]), batch_size=self.batch_size, shuffle=True)


class MLP(L.LightningModule):
    def __init__(self, width=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(30, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--scratch", default=os.environ.get("MOL_SCRATCH", "scratch"))
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    L.seed_everything(19)
    torch.set_num_threads(1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(MLP(), Molecules(args.scratch))
