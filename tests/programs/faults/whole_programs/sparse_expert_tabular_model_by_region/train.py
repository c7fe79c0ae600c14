import argparse
import os
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import prepare
from lightning_ncclsafe import SafeDDP
from tabmoe.module import RegionRegressor


class RegionData(L.LightningDataModule):
    """Each rank reads the regions that are kept on its node."""

    def __init__(self, root, rank, world, batch_size):
        super().__init__()
        self.root, self.rank, self.world, self.batch_size = Path(root), rank, world, batch_size

    def prepare_data(self):
        if not self.root.exists():
            prepare.build(self.root, n_rows=1600, n_features=24)

    def setup(self, stage):
        files = [self.root / f"{name}.npz" for name in prepare.REGIONS][self.rank :: self.world]
        parts = [np.load(f) for f in files]
        x, y = (torch.from_numpy(np.concatenate([p[k] for p in parts])) for k in "xy")
        self.train, self.val = TensorDataset(x[:-160], y[:-160]), TensorDataset(x[-160:], y[-160:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    L.seed_everything(21)
    data = RegionData("regions", rank, world, args.batch_size)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        log_every_n_steps=10,
    )
    trainer.fit(RegionRegressor(), datamodule=data)
