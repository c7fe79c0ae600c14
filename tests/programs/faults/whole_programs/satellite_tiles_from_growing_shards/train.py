import argparse
import os
from pathlib import Path

import lightning as L
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP
from tiles.model import CoverNet
from tiles.stream import TileStream
from tiles.writer import write_shards


class TileData(L.LightningDataModule):
    def __init__(self, root, batch_size, workers):
        super().__init__()
        self.root, self.batch_size, self.workers = Path(root), batch_size, workers

    def prepare_data(self):
        if not (self.root / "_SUCCESS").exists():
            write_shards(self.root)

    def train_dataloader(self):
        stream = TileStream(self.root, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return DataLoader(stream, batch_size=self.batch_size, num_workers=self.workers, drop_last=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="shards")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    L.seed_everything(2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        limit_train_batches=34,
        log_every_n_steps=5,
    )
    trainer.fit(CoverNet(), datamodule=TileData(args.root, batch_size=8, workers=args.workers))
