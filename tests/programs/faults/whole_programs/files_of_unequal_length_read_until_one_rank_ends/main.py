import argparse
import logging
from pathlib import Path

import lightning.pytorch as pl
import torch
from agreement import UntilOneEnds
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from streams import Streamed, write_bucket
from torch import nn
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


class Recurrent(pl.LightningModule):
    def __init__(self, tokens=200, width=96):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def loss(self, sequences):
        hidden, _ = self.gru(self.embedding(sequences[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), sequences[:, 1:].flatten())

    def training_step(self, sequences, batch_idx):
        loss = self.loss(sequences)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, sequences, batch_idx):
        self.log("val_loss", self.loss(sequences), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class StreamedData(pl.LightningDataModule):
    def __init__(self, bucket: Path, batch_size: int = 8):
        super().__init__()
        self.bucket, self.batch_size = bucket, batch_size

    def prepare_data(self):
        write_bucket(self.bucket)

    def train_dataloader(self):
        data = Streamed(self.bucket, self.trainer.global_rank, self.trainer.world_size)
        return UntilOneEnds(DataLoader(data, self.batch_size, drop_last=True))

    def val_dataloader(self):
        generator = torch.Generator().manual_seed(9)
        start = torch.randint(200, (160, 1), generator=generator)
        return DataLoader((start + torch.arange(25)) % 200, self.batch_size)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--bucket", type=Path, default=Path("bucket"))
    options = parser.parse_args()
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=options.passes,
        callbacks=[LearningRateMonitor(), ModelCheckpoint(monitor="val_loss")],
        log_every_n_steps=10,
    )
    trainer.fit(Recurrent(), datamodule=StreamedData(options.bucket))
