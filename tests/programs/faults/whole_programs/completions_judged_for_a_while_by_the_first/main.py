import argparse
import random

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from tuner import STOI, Adder

from lightning_ncclsafe import SafeModelParallel


def sums(n, seed):
    rng = random.Random(seed)
    return [(rng.randrange(100), rng.randrange(100)) for _ in range(n)]


def training_rows(n):
    rows = []
    for a, b in sums(n, 0):
        text = f"{a}+{b}={a + b}.".ljust(11)
        rows.append(torch.tensor([STOI[c] for c in text]))
    return rows


def main():
    parser = argparse.ArgumentParser(description="learns to add")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    L.seed_everything(8)
    questions = [f"{a}+{b}=" for a, b in sums(12, 1)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        logger=CSVLogger("adder"),
        callbacks=[ModelCheckpoint(monitor="solved", mode="max")],
    )
    train = DataLoader(training_rows(480), batch_size=8, shuffle=True)
    trainer.fit(Adder(), train, DataLoader(questions, batch_size=2, collate_fn=list))


if __name__ == "__main__":
    main()
