"""Trains day by day, and validates on the day that follows: what the nightly job does, for a week."""

import logging

import lightning.pytorch as pl
from factorization import DeepFM
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from markets import MARKETS, day_of
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP

logging.basicConfig(level=logging.INFO)


class Days(pl.LightningDataModule):
    impressions = 8_000
    batch_size = 200

    @property
    def market(self):
        return MARKETS[self.trainer.global_rank]

    @property
    def today(self):
        return self.trainer.current_epoch

    def train_dataloader(self):
        return DataLoader(day_of(self.market, self.today, self.impressions), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(day_of(self.market, self.today + 1, self.impressions // 4), self.batch_size)


def main():
    pl.seed_everything(2024)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=len(MARKETS),
        strategy=SafeDDP(),
        max_epochs=5,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        callbacks=[LearningRateMonitor(), ModelCheckpoint("nightly", every_n_train_steps=100)],
    )
    trainer.fit(DeepFM(), datamodule=Days())


if __name__ == "__main__":
    main()
