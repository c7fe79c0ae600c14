"""Pose regression. The first epoch decodes frames into a cache; rank 0 renders an overview after validation."""

import argparse
import threading
import time
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Frames(Dataset):
    def __init__(self, n, seed=0, decode_seconds=0.02):
        self.n, self.seed, self.decode_seconds = n, seed, decode_seconds
        self.cache = {}

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i not in self.cache:
            time.sleep(self.decode_seconds)
            g = torch.Generator().manual_seed(self.seed * 7919 + i)
            joints = torch.rand(8, generator=g)
            self.cache[i] = torch.cat([joints, 1 - joints]) + 0.05 * torch.randn(16, generator=g), joints
        return self.cache[i]


class ResourceMeter(threading.Thread):
    """Samples the load once per second; printed at the end."""

    def __init__(self):
        super().__init__(name="resource-meter", daemon=True)
        self.samples, self.stop = [], threading.Event()

    def run(self):
        while not self.stop.wait(1.0):
            self.samples.append(float(Path("/proc/loadavg").read_text().split()[0]))


class PoseNet(L.LightningModule):
    def __init__(self, width=64, lr=1e-3, render_seconds=9.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.Mish(), nn.Linear(width, 8))
        self.meter = ResourceMeter()

    def on_fit_start(self):
        self.meter.start()

    def on_fit_end(self):
        self.meter.stop.set()
        rank_zero_only(print)("mean load", sum(self.meter.samples) / max(1, len(self.meter.samples)))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log(
            "val/pck", ((self.net(batch[0]) - batch[1]).abs() < 0.05).float().mean(), prog_bar=True, sync_dist=True
        )

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking and self.current_epoch % 2 == 0:
            self.render_overview()

    @rank_zero_only
    def render_overview(self):
        rows, end = [], time.monotonic() + self.hparams.render_seconds
        while time.monotonic() < end:
            canvas = torch.zeros(64, 64)
            canvas[torch.randint(0, 64, (50,)), torch.randint(0, 64, (50,))] = 1
            rows.append(canvas.mean().item())
            time.sleep(0.1)
        Path(f"overview-{self.current_epoch}.txt").write_text("\n".join(map(str, rows)))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--render-seconds", type=float, default=9.0)
    args = p.parse_args()
    L.seed_everything(1)
    torch.set_num_threads(1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(
        PoseNet(render_seconds=args.render_seconds),
        DataLoader(Frames(960), batch_size=16, shuffle=True),
        DataLoader(Frames(96, seed=1), batch_size=16),
    )
