"""ResMLP on patches of synthetic textures; curves go to the lab's dashboard."""

import argparse
import atexit
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tracking import DashboardLogger

from lightning_ncclsafe import SafeDDP


class Textures(Dataset):
    def __init__(self, n, classes=8, seed=0):
        self.n, self.classes, self.seed = n, classes, seed
        self.grid = torch.linspace(0, 6.28, 24)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        y = i % self.classes
        g = torch.Generator().manual_seed(i * 7919 + self.seed)
        phase = torch.rand(1, generator=g) * 6
        wave = torch.sin((y + 1) * self.grid + phase)
        return (wave[:, None] * wave[None]) + 0.3 * torch.randn(24, 24, generator=g), y


class ResMLPBlock(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Linear(patches, patches)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 2), nn.GELU(), nn.Linear(dim * 2, dim))

    def forward(self, x):
        x = x + self.mix(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.n2(x))


class ResMLP(L.LightningModule):
    def __init__(self, depth=3, dim=48, patch=6, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, dim)
        self.blocks = nn.Sequential(*[ResMLPBlock((24 // patch) ** 2, dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        p = self.patch
        x = x.unfold(1, p, p).unfold(2, p, p).flatten(3).flatten(1, 2)
        return self.head(self.blocks(self.embed(x)).mean(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.02)


class StepTime(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.t0 = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("step_time", time.perf_counter() - self.t0)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def local_dashboard():
    """Without --dashboard the main process starts one of its own."""
    port = free_port()
    server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("dashboard.py")), str(port)])
    atexit.register(server.kill)
    for _ in range(100):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    return f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="resmlp")
    parser.add_argument("--dashboard")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    L.seed_everything(0)
    url = args.dashboard
    if url is None and int(os.environ.get("RANK", "0")) == 0:
        url = local_dashboard()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=DashboardLogger(url, args.name),
        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max"), StepTime(), StochasticWeightAveraging(5e-4)],
        log_every_n_steps=5,
    )
    trainer.fit(
        ResMLP(),
        DataLoader(Textures(6400), batch_size=32, shuffle=True),
        DataLoader(Textures(640, seed=1), batch_size=32),
    )
