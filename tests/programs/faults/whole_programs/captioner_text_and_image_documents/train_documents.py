import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from mm.documents import Documents, collate, crawl
from mm.model import DocumentModel
from mm.sampler import ContiguousShardSampler


class DocumentData(L.LightningDataModule):
    def __init__(self, root, batch_size):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        crawl(self.root)

    def setup(self, stage):
        self.train = Documents(self.root / "index.jsonl")

    def train_dataloader(self):
        sampler = ContiguousShardSampler(len(self.train), self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(self.train, self.batch_size, sampler=sampler, collate_fn=collate, num_workers=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="crawl")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        log_every_n_steps=5,
    )
    trainer.fit(DocumentModel(), DocumentData(args.root, args.batch_size))
