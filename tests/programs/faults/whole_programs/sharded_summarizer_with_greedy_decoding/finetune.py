import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeModelParallel
from torch.utils.data import DataLoader

from summ.articles import Articles, build, collate
from summ.task import Summarizer


class News(L.LightningDataModule):
    def __init__(self, root, batch_size):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        build(self.root)

    def train_dataloader(self):
        return DataLoader(Articles(self.root / "train.jsonl"), self.batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(Articles(self.root / "val.jsonl"), 4, collate_fn=collate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="news")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        log_every_n_steps=5,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
    )
    trainer.fit(Summarizer(), News(args.root, args.batch_size))
