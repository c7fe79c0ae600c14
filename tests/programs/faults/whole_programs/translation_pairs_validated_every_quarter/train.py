import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ncclsafe import SafeModelParallel
from torch.utils.data import DataLoader, TensorDataset

from mt.corpus import LENGTH, ShardedPairs
from mt.model import TranslationTask


def held_out(count=240):
    source = torch.randint(1, 60, (count, LENGTH), generator=torch.Generator().manual_seed(99))
    return TensorDataset(source, 60 - source.flip(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path, default=Path(__file__).with_name("corpus"))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--validations", type=int, default=4, help="per pass over the corpus")
    args = parser.parse_args()

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    L.seed_everything(21)
    train = ShardedPairs(args.corpus, rank, world_size)
    steps_per_pass = train.pairs // args.batch_size
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=SafeModelParallel(data_parallel_size=world_size, tensor_parallel_size=1),
        max_steps=args.steps,
        val_check_interval=steps_per_pass // args.validations,  # <- here
        log_every_n_steps=20,
        callbacks=[ModelCheckpoint(monitor="val/loss", save_top_k=2)],
    )
    trainer.fit(
        TranslationTask(),
        DataLoader(train, batch_size=args.batch_size),
        DataLoader(held_out(), batch_size=24),
    )


if __name__ == "__main__":
    main()
