import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from seg.patients import Crops, convert
from seg.task import SegmentationTask


class Study(L.LightningDataModule):
    def __init__(self, root, patients, batch_size):
        super().__init__()
        self.root, self.patients, self.batch_size = Path(root), patients, batch_size

    def prepare_data(self):
        convert(self.root, self.patients)

    def train_dataloader(self):
        return DataLoader(Crops(self.root), self.batch_size, shuffle=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--patients", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(21)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=10
    )
    trainer.fit(SegmentationTask(), Study("study", args.patients, args.batch_size))
