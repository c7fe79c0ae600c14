import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from parsing.classifier import TopicClassifier
from parsing.inbox import deposit
from parsing.mails import Mails


class Inbox(L.LightningDataModule):
    def __init__(self, root, batch_size):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        deposit(self.root)

    def train_dataloader(self):
        part = self.root / f"part{self.trainer.global_rank}.jsonl"
        return DataLoader(Mails(part), batch_size=self.batch_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--inbox", default="inbox")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-epochs", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(2)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.max_epochs, use_distributed_sampler=False
    )
    trainer.fit(TopicClassifier(), Inbox(args.inbox, args.batch_size))
