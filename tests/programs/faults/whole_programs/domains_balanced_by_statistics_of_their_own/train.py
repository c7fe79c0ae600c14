"""Multi-domain regression; every domain keeps feature statistics that are shared by all processes."""

import argparse
import os

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP

DOMAINS = ("sketch", "photo", "clipart")


def read_shard(rank: int, rows: int = 480):
    g = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(rows, 24, generator=g)
    domain = torch.randint(0, len(DOMAINS), (rows,), generator=g)
    domain[0] = rank % len(DOMAINS)
    y = x[:, :4].sum(1, keepdim=True) + 0.3 * domain.unsqueeze(1)
    return x, domain, y


class DomainNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.groups = {}
        for name in DOMAINS:
            self.register_buffer(f"mean_{name}", torch.zeros(dim))
            self.register_buffer(f"var_{name}", torch.ones(dim))
        self.scale = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    @torch.no_grad()
    def update(self, x, domain, momentum: float = 0.1):
        for i, name in enumerate(DOMAINS):
            rows = x[domain == i]
            stats = torch.stack([rows.sum(0), rows.square().sum(0), torch.full((x.shape[1],), float(len(rows)))])
            dist.all_reduce(stats, group=self.groups[name])
            total = stats[2].clamp(min=1)
            mean = stats[0] / total
            getattr(self, f"mean_{name}").lerp_(mean, momentum)
            getattr(self, f"var_{name}").lerp_(stats[1] / total - mean**2, momentum)

    def forward(self, x, domain):
        mean = torch.stack([getattr(self, f"mean_{n}") for n in DOMAINS])[domain]
        var = torch.stack([getattr(self, f"var_{n}") for n in DOMAINS])[domain]
        return (x - mean) / (var.clamp(min=1e-4) + 1e-5).sqrt() * self.scale + self.shift


class DomainRegressor(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.norm = DomainNorm(24)
        self.body = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 1))

    def on_fit_start(self):
        _, domain, _ = self.trainer.datamodule.shard
        for i in dict.fromkeys(domain.tolist()):
            self.norm.groups[DOMAINS[i]] = dist.new_group()  # <- here

    def forward(self, x, domain):
        return self.body(self.norm(x, domain))

    def training_step(self, batch, batch_idx):
        x, domain, y = batch
        self.norm.update(x, domain)
        loss = nn.functional.smooth_l1_loss(self(x, domain), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, domain, y = batch
        self.log("val/mae", (self(x, domain) - y).abs().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Shards(L.LightningDataModule):
    def setup(self, stage):
        self.shard = read_shard(int(os.environ["RANK"]))

    def train_dataloader(self):
        return DataLoader(TensorDataset(*(t[:400] for t in self.shard)), batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*(t[400:] for t in self.shard)), batch_size=16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        log_every_n_steps=5,
    )
    trainer.fit(DomainRegressor(), datamodule=Shards())
