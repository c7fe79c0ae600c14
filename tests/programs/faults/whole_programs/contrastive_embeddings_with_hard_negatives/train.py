import argparse
import math

import lightning as L
import numpy as np
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from bank import NegativeBank


class Sessions(IterableDataset):
    """Click sessions of one market: pairs of views of an item, and how many are worth keeping."""

    MARKETS = {"de": 0.15, "us": 0.9, "fr": 0.2}

    def __init__(self, market, steps, batch_size, seed):
        self.share = self.MARKETS[market]
        self.steps = steps
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        for _ in range(self.steps):
            anchor = torch.randn(self.batch_size, 64, generator=self.generator)
            positive = anchor + 0.3 * torch.randn(self.batch_size, 64, generator=self.generator)
            clicked = torch.rand(self.batch_size, generator=self.generator) < self.share
            yield anchor, positive, clicked


class Contrastive(L.LightningModule):
    def __init__(self, width=128, negatives=256, bank_rows=9000, temperature=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, width))

    def setup(self, stage):
        self.bank = NegativeBank(f"bank/rank{self.global_rank}.f32", self.hparams.width, self.hparams.bank_rows)
        self.rng = np.random.default_rng(self.global_rank)

    def embed(self, x):
        return nn.functional.normalize(self.encoder(x), dim=-1)

    def training_step(self, batch, batch_idx):
        anchor, positive, clicked = batch
        a, p = self.embed(anchor), self.embed(positive)
        logits = a @ p.T
        self.bank.add(p.detach()[clicked].numpy())
        if self.bank.rows > 512:
            negatives = torch.from_numpy(self.bank.sample(self.hparams.negatives, self.rng))
            logits = torch.cat([logits, a @ negatives.T], dim=1)
        loss = nn.functional.cross_entropy(logits / self.hparams.temperature, torch.arange(len(a)))
        self.log("loss", loss, prog_bar=True)
        self.log("perplexity", math.exp(min(loss.item(), 20.0)))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class MarketData(L.LightningDataModule):
    def __init__(self, steps, batch_size=32):
        super().__init__()
        self.steps = steps
        self.batch_size = batch_size

    def train_dataloader(self):
        rank = self.trainer.global_rank
        market = list(Sessions.MARKETS)[rank % len(Sessions.MARKETS)]
        return DataLoader(Sessions(market, self.steps, self.batch_size, seed=rank), batch_size=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--bank-rows", type=int, default=9000)
    args = parser.parse_args()
    L.seed_everything(12)
    trainer = L.Trainer(accelerator="cpu", devices=args.devices, strategy=SafeDDP(), max_epochs=2, log_every_n_steps=25)
    trainer.fit(Contrastive(bank_rows=args.bank_rows), MarketData(args.steps))


if __name__ == "__main__":
    main()
