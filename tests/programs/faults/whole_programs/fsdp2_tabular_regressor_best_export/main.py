import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeModelParallel
from torch.utils.data import DataLoader, TensorDataset

from export import BestWeightsExport
from model import TabularRegressor


def make_split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 24, generator=g)
    y = x[:, :4].sum(1) + 0.5 * x[:, 4] * x[:, 5] + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, y)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--devices", type=int, default=3)
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--out", default="exports")
    return p.parse_args()


def main():
    args = parse()
    L.seed_everything(3)
    train = DataLoader(make_split(1800, 1), batch_size=30, shuffle=True)
    val = DataLoader(make_split(360, 2), batch_size=60)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.epochs,
        callbacks=[BestWeightsExport(args.out)],
        log_every_n_steps=10,
    )
    trainer.fit(TabularRegressor(), train, val)


if __name__ == "__main__":
    main()
