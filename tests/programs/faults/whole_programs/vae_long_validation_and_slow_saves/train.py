"""VAE with a deliberately thorough validation and checkpoints that are verified after writing."""

import argparse
import hashlib
import os
import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class VerifiedIO(TorchCheckpointIO):
    """Our object store is eventually consistent: read back until the digest is stable for `settle` seconds."""

    def __init__(self, settle):
        super().__init__()
        self.settle = settle

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        with open(path, "rb+") as f:
            os.fsync(f.fileno())
        end, digests = time.monotonic() + self.settle, set()
        while time.monotonic() < end:
            with open(path, "rb") as f:
                digests.add(hashlib.sha256(f.read()).hexdigest())
            time.sleep(0.5)
        if len(digests) != 1:
            raise OSError(f"{path} changed while it was read back")


class Spectra(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        centre = torch.rand(n, 1, generator=g) * 50
        self.x = torch.exp(-((torch.arange(50)[None] - centre) ** 2) / 18)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class VAE(L.LightningModule):
    def __init__(self, latent=3, samples=400, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.enc = nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 50))

    def elbo(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(-1)
        return (F.mse_loss(self.dec(z), x, reduction="none").sum(-1) + 0.05 * kl).mean()

    def training_step(self, x, batch_idx):
        loss = self.elbo(x)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, x, batch_idx):
        bound = torch.stack([self.elbo(x) for _ in range(self.hparams.samples)])
        time.sleep(0.4)
        self.log("val/bound", -torch.logsumexp(-bound, 0) + torch.tensor(float(len(bound))).log(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--settle", type=float, default=11.0)
    ap.add_argument("--epochs", type=int, default=2)
    ns = ap.parse_args()
    L.seed_everything(23)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        plugins=[VerifiedIO(ns.settle)],
        max_epochs=ns.epochs,
        callbacks=[ModelCheckpoint(monitor="val/bound", save_top_k=1)],
    )
    trainer.fit(
        VAE(),
        DataLoader(Spectra(1280, 1), batch_size=32, shuffle=True),
        DataLoader(Spectra(400, 2), batch_size=10),
    )
