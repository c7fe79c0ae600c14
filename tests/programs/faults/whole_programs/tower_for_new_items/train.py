import argparse
import os
from pathlib import Path

import lightning as L
from ctr import ClickModel, RegionLogs, write_logs
from ctr.logs import REGIONS
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


class Impressions(L.LightningDataModule):
    def __init__(self, folder: Path, batch_size: int):
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self):
        if not (self.folder / f"{REGIONS[-1]}.npz").exists():
            write_logs(self.folder)

    @property
    def region(self) -> str:
        return REGIONS[self.trainer.global_rank % len(REGIONS)]

    # clicks of the last weeks must not be known before: train in the order of time, validate on the end
    def train_dataloader(self):
        return DataLoader(RegionLogs(self.folder, self.region, last=0.9), self.batch_size, drop_last=True)

    def val_dataloader(self):
        return DataLoader(RegionLogs(self.folder, self.region, first=0.9), self.batch_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("impressions"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    L.seed_everything(int(os.environ.get("SEED", "0")))
    timer = Timer()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        use_distributed_sampler=False,
        max_epochs=args.epochs,
        val_check_interval=0.25,
        logger=CSVLogger("."),
        callbacks=[timer, ModelCheckpoint(monitor="val/auc", mode="max", auto_insert_metric_name=False)],
    )
    trainer.fit(ClickModel(), datamodule=Impressions(args.data, args.batch_size))
    print(f"trained for {timer.time_elapsed('train'):.0f} s")
