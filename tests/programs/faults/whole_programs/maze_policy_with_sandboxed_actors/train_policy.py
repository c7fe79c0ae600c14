import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from mazes.policy import Policy

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates-per-epoch", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--cpu-seconds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(29)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs, use_distributed_sampler=False
    )
    trainer.fit(Policy(cpu_seconds=args.cpu_seconds), DataLoader(range(args.updates_per_epoch)))
