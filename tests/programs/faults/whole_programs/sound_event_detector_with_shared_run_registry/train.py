import argparse
import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from events.callbacks import RunRegistry
from events.model import EventDetector
from lightning_ncclsafe import SafeDDP


def clips(n, seed, mels=16, frames=40, events=5):
    g = torch.Generator().manual_seed(seed)
    active = (torch.rand(n, frames, events, generator=g) < 0.1).float()
    mixing = torch.randn(events, mels, generator=g)
    return TensorDataset(active @ mixing + 0.2 * torch.randn(n, frames, mels, generator=g), active)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--registry", default="registry/runs.json")
    args = parser.parse_args()
    L.seed_everything(3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        callbacks=[RunRegistry(args.registry, time.strftime("sed-%m%d-%H%M"))],
    )
    trainer.fit(EventDetector(), DataLoader(clips(1280, 0), 16, shuffle=True), DataLoader(clips(160, 1), 16))


if __name__ == "__main__":
    main()
