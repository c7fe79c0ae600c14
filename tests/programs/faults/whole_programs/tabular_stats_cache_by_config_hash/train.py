"""Tabular regression; feature statistics are computed once by rank 0 and read from the cache by everybody."""

import argparse
import json
import os
import time
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP


def make_table(rows=3000, cols=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g) * torch.linspace(0.1, 30, cols) + 5
    y = (x / x.std(0)) @ torch.randn(cols, 1, generator=g)
    return x, y


class StatsCache:
    def __init__(self, root, config):
        self.root = Path(root)
        key = hash(tuple(sorted(config.items()))) & 0xFFFFFFFF  # <- here
        self.path = self.root / f"stats-{key:08x}.json"

    def write(self, stats):
        self.root.mkdir(parents=True, exist_ok=True)
        tmp = self.path.with_suffix(".tmp")
        tmp.write_text(json.dumps(stats))
        os.replace(tmp, self.path)

    def wait(self, poll=0.5):
        while not self.path.exists():
            time.sleep(poll)
        return json.loads(self.path.read_text())


class TableData(L.LightningDataModule):
    def __init__(self, cache_dir, normalisation="zscore", clip="none", batch_size=32):
        super().__init__()
        self.config = {"table": "energy", "normalisation": normalisation, "clip": clip}
        self.cache = StatsCache(cache_dir, self.config)
        self.batch_size = batch_size

    def prepare_data(self):
        if not self.cache.path.exists():
            x, _ = make_table()
            self.cache.write({"mean": x.mean(0).tolist(), "std": x.std(0).tolist()})

    def setup(self, stage):
        stats = self.cache.wait()
        x, y = make_table()
        x = (x - torch.tensor(stats["mean"])) / torch.tensor(stats["std"])
        self.train = TensorDataset(x[:2600], y[:2600])
        self.val = TensorDataset(x[2600:], y[2600:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class Regressor(L.LightningModule):
    def __init__(self, cols=24, width=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(cols, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.huber_loss(self(batch[0]), batch[1])
        self.log("train/huber", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/mae", F.l1_loss(self(batch[0]), batch[1]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache-dir", default="cache")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    L.seed_everything(3)
    torch.set_num_threads(1)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(Regressor(), TableData(args.cache_dir))
