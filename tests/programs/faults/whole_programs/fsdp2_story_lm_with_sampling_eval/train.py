import argparse

import lightning as L
from lightning_ncclsafe import SafeModelParallel

from model import StoryLM
from stories import StoryData


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.epochs,
        log_every_n_steps=10,
    )
    trainer.fit(StoryLM(lr=args.lr), datamodule=StoryData())


if __name__ == "__main__":
    main()
