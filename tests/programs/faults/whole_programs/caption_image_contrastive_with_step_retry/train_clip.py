import argparse
import os

import lightning as L
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from clip import TinyClip
from pairs import CaptionPairs, collate, write_pairs


class PairData(L.LightningDataModule):
    def __init__(self, path, batch_size=8):
        super().__init__()
        self.path, self.batch_size = path, batch_size

    def prepare_data(self):
        if not os.path.exists(self.path):
            write_pairs(self.path)

    def train_dataloader(self):
        return DataLoader(CaptionPairs(self.path), self.batch_size, shuffle=True, collate_fn=collate, drop_last=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/pairs.jsonl")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(12)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=10
    )
    trainer.fit(TinyClip(), datamodule=PairData(args.data))
