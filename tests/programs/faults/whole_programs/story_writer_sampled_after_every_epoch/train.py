import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning_ncclsafe import SafeModelParallel

from writer.data import StoryData
from writer.model import StoryWriter


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/stories")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        callbacks=[LearningRateMonitor()],
    )
    trainer.fit(StoryWriter(), datamodule=StoryData(args.data))


if __name__ == "__main__":
    main()
