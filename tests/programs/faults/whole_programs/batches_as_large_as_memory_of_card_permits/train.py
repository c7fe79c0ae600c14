"""Tabular regression on a mixed machine: two large cards and a small one (here: by a table)."""

import argparse
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP

CARDS = {0: {"name": "A6000", "gib": 48}, 1: {"name": "A6000", "gib": 48}, 2: {"name": "3090", "gib": 24}}


def memory_of_card(local_rank: int) -> int:
    return CARDS[local_rank]["gib"]


def micro_batch(gib: int) -> int:
    """Rows that fit: 0.7 rows per GiB, in powers of two."""
    size = 1
    while size * 2 <= gib * 0.7:
        size *= 2
    return size


class Rows(L.LightningDataModule):
    def __init__(self, batch_size: int, steps: int = 160):
        super().__init__()
        self.batch_size, self.steps = batch_size, steps

    def setup(self, stage):
        g = torch.Generator().manual_seed(int(os.environ["RANK"]))
        x = torch.randn(self.batch_size * self.steps, 40, generator=g)
        self.train = TensorDataset(x, x[:, :3].prod(1, keepdim=True))
        x = torch.randn(256, 40, generator=g)
        self.val = TensorDataset(x, x[:, :3].prod(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=16)


class Regressor(L.LightningModule):
    def __init__(self, width: int = 128, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(40, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", nn.functional.huber_loss(self.net(x), y), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "epoch"},
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--target-batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    L.seed_everything(2024)
    batch_size = micro_batch(memory_of_card(int(os.environ["LOCAL_RANK"])))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        accumulate_grad_batches=max(1, args.target_batch // batch_size),  # <- here
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
    )
    trainer.fit(Regressor(), datamodule=Rows(batch_size))


if __name__ == "__main__":
    main()
