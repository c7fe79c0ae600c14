import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from audio.model import Tagger
from audio.recordings import record
from audio.stream import Stations


class Field(L.LightningDataModule):
    def __init__(self, root, threads, batches):
        super().__init__()
        self.root, self.threads, self.batches = Path(root), threads, batches

    def prepare_data(self):
        record(self.root)

    def train_dataloader(self):
        stations = Stations(
            self.root, self.trainer.global_rank, self.trainer.world_size, self.threads, batches=self.batches
        )
        return DataLoader(stations, batch_size=None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="field")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, default=25, help="per epoch, the same on all ranks")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(10)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=5)
    trainer.fit(Tagger(), Field(args.root, args.threads, args.batches))
