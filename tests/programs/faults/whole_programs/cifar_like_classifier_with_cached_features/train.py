"""Classifier on expensive augment-and-filter features that are cached after their first use."""

import time

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class CachedFeatures(Dataset):
    def __init__(self, n, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 10, (n,), generator=gen)
        self.cache = {}

    def __len__(self):
        return len(self.labels)

    def extract(self, i):
        """Scattering-like features; slow, as on a laptop with a cold disk."""
        gen = torch.Generator().manual_seed(i)
        image = torch.randn(3, 32, 32, generator=gen) + 0.1 * self.labels[i]
        time.sleep(0.06 + 0.04 * (i % 3))
        spectrum = torch.fft.rfft2(image).abs().log1p()
        return spectrum[:, :16, :16].flatten()

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = self.extract(i)
        return self.cache[i], self.labels[i]


class Head(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(768, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


class FixedShare(torch.utils.data.Sampler):
    """Every rank keeps its own samples, so that its cache stays warm."""

    def __init__(self, n, rank, world_size):
        self.indices = torch.arange(n)[rank::world_size]

    def __iter__(self):
        return iter(self.indices[torch.randperm(len(self.indices))].tolist())

    def __len__(self):
        return len(self.indices)


class Data(L.LightningDataModule):
    def setup(self, stage):
        self.train, self.val = CachedFeatures(384), CachedFeatures(48, seed=1)

    def loader(self, data):
        share = FixedShare(len(data), self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(data, batch_size=16, sampler=share)

    def train_dataloader(self):
        return self.loader(self.train)

    def val_dataloader(self):
        return self.loader(self.val)


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=12,
        strategy=SafeDDP(),
        use_distributed_sampler=False,
        log_every_n_steps=5,
    )
    trainer.fit(Head(), datamodule=Data())
