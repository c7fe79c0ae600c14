"""Speech encoder with LayerDrop, trained to find the masked frames of random features."""

import random

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Frames(Dataset):
    def __init__(self, n: int, seed: int, frames: int = 24, dim: int = 32):
        g = torch.Generator().manual_seed(seed)
        base = torch.randn(n, 1, dim, generator=g)
        drift = torch.randn(n, frames, dim, generator=g).cumsum(1) * 0.1
        self.features = base + drift
        self.masks = torch.rand(n, frames, generator=g) < 0.25

    def __len__(self):
        return len(self.features)

    def __getitem__(self, i):
        return self.features[i], self.masks[i]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, dim: int = 32, depth: int = 4, layerdrop: float = 0.02):
        super().__init__()
        self.mask_embedding = nn.Parameter(torch.zeros(dim))
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.layerdrop = layerdrop

    def forward(self, x, mask):
        x = torch.where(mask.unsqueeze(-1), self.mask_embedding, x)
        for layer in self.layers:
            if self.training and random.random() < self.layerdrop:  # <- here
                continue
            x = layer(x)
        return self.norm(x)


class Pretraining(L.LightningModule):
    def __init__(self, lr: float = 5e-4, warmup: int = 50):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder()
        self.head = nn.Linear(32, 32)

    def on_train_start(self):
        random.seed(55 + self.global_rank)

    def loss(self, batch):
        features, mask = batch
        out = self.head(self.encoder(features, mask))
        return nn.functional.mse_loss(out[mask], features[mask])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.hparams.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    train = DataLoader(Frames(1920, seed=0), batch_size=8, shuffle=True)
    val = DataLoader(Frames(128, seed=1), batch_size=8)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=10, log_every_n_steps=10)
    trainer.fit(Pretraining(), train, val)
