import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from lm.budget import TokenBudget
from lm.corpus import SOURCES, SourceStream, pad, tokenise
from lm.model import GRULanguageModel


class CorpusModule(L.LightningDataModule):
    def __init__(self, root: Path, batch_size: int):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def prepare_data(self):
        tokenise(self.root)

    def train_dataloader(self):
        source = list(SOURCES)[self.trainer.global_rank % len(SOURCES)]
        return DataLoader(SourceStream(self.root, source), batch_size=self.batch_size, collate_fn=pad)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--tokens", type=float, default=1.2e5)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()

    torch.set_num_threads(1)
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=20,
        callbacks=[
            TokenBudget(args.tokens),
            LearningRateMonitor("step"),
            ModelCheckpoint(dirpath="checkpoints", save_last=True),
        ],
    )
    trainer.fit(GRULanguageModel(), CorpusModule(Path("corpus"), args.batch_size))


if __name__ == "__main__":
    main()
