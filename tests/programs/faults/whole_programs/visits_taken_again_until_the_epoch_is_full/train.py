import argparse
import math

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader
from visits import CODES, HOSPITALS, Visits, collate

from lightning_ncclsafe import SafeDDP


class Readmission(L.LightningModule):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.codes = nn.Embedding(CODES, width, padding_idx=0)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)
        self.seen = 0
        self.group = None

    def setup(self, stage: str) -> None:
        if self.group is None:
            self.group = dist.new_group()

    def forward(self, codes):
        _, state = self.rnn(self.codes(codes))
        return self.head(state[-1]).squeeze(1)

    def training_step(self, batch, batch_idx):
        codes, returned = batch
        self.seen += len(codes)
        loss = nn.functional.binary_cross_entropy_with_logits(self(codes), returned)
        if loss > 2.5 and self.global_rank == 3:
            print(f"batch {batch_idx} of hospital {self.trainer.datamodule.hospital}: loss {loss:.2f}")
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        seen = torch.tensor([float(self.seen)])
        dist.all_reduce(seen, group=self.group)
        self.print(f"{int(seen)} visits seen")

    def validation_step(self, batch, batch_idx):
        codes, returned = batch
        return nn.functional.binary_cross_entropy_with_logits(self(codes), returned)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Hospitals(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    @property
    def hospital(self) -> str:
        return sorted(HOSPITALS)[self.trainer.global_rank]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Visits(self.hospital, seed=0), self.batch_size, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        # without gradients and without a reduction, ranks may have different numbers of batches
        return DataLoader(Visits(self.hospital, seed=1, repeat=False), self.batch_size, collate_fn=collate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    L.seed_everything(9)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        limit_train_batches=math.ceil(max(HOSPITALS.values()) / args.batch_size),
        callbacks=[TQDMProgressBar(refresh_rate=20)],
    )
    trainer.fit(Readmission(), datamodule=Hospitals(args.batch_size))
