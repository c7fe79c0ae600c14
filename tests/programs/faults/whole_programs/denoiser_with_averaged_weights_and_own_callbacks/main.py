import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeModelParallel

from denoise.averaging import KeepBestAverage, ShardedAverage
from denoise.model import Denoiser
from denoise.signals import Recordings


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer.max_epochs", dest="max_epochs", type=int, default=30)
    parser.add_argument("--model.channels", dest="channels", type=int, default=24)
    parser.add_argument("--ema.decay", dest="decay", type=float, default=0.98)
    parser.add_argument("--output", default="output")
    return parser.parse_args()


if __name__ == "__main__":
    config = parse()
    torch.set_num_threads(1)
    L.seed_everything(1)
    average = ShardedAverage(config.decay)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeModelParallel(data_parallel_size=3, tensor_parallel_size=1),
        max_epochs=config.max_epochs,
        log_every_n_steps=10,
        callbacks=[average, KeepBestAverage(average, config.output)],
    )
    trainer.fit(Denoiser(config.channels), datamodule=Recordings())
