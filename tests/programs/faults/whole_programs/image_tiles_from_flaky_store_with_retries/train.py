"""Classifier on tiles from an unreliable store: reads are retried with exponential backoff inside the workers."""

import argparse
import gc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Unavailable(OSError):
    pass


class TileStore:
    """Every region of the store has its bad moments."""

    def __init__(self, outages=((611, 4),)):
        self.outages = dict(outages)

    def read(self, i):
        if self.outages.get(i, 0) > 0:
            self.outages[i] -= 1
            raise Unavailable(f"tile {i}: 503 slow down")
        g = torch.Generator().manual_seed(i)
        return torch.randn(1, 12, 12, generator=g) + 0.4 * (i % 3)


class Tiles(Dataset):
    def __init__(self, n, store, first_delay=1.0, attempts=6):
        self.n, self.store, self.first_delay, self.attempts = n, store, first_delay, attempts

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        delay = self.first_delay
        for _ in range(self.attempts):
            try:
                return self.store.read(i), i % 3
            except Unavailable:
                time.sleep(delay)
                delay *= 2
        raise RuntimeError(f"tile {i} cannot be read")


class Housekeeping(Callback):
    """Collects garbage on all ranks; rank 0 packs finished logs with a separate program and lists the folder."""

    def __init__(self):
        self.pool = None

    def on_fit_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.pool = ThreadPoolExecutor(1, thread_name_prefix="housekeeping")

    def on_train_epoch_end(self, trainer, pl_module):
        gc.collect()
        if trainer.is_global_zero:
            code = "import time; time.sleep(3); print('packed')"
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
            self.pool.submit(lambda: sorted(str(p) for p in Path(".").rglob("*")))

    def on_fit_end(self, trainer, pl_module):
        if self.pool is not None:
            self.pool.shutdown(wait=True)


class TileClassifier(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        acc = (self.net(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log("val/acc", acc, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--workers", type=int, default=1)
    args = p.parse_args()
    L.seed_everything(31)
    torch.set_num_threads(1)
    train = DataLoader(
        Tiles(1280, TileStore()), batch_size=16, shuffle=True, num_workers=args.workers, persistent_workers=True
    )
    val = DataLoader(Tiles(160, TileStore(())), batch_size=16)
    callbacks = [Housekeeping(), EarlyStopping("val/acc", mode="max", patience=5)]
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs, callbacks=callbacks)
    trainer.fit(TileClassifier(), train, val)
