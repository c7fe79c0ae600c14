import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from stations import DAYS, Measurements, count_rows, write_stations
from torch import nn
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


@dataclass
class Plan:
    files: list[Path]
    batch_size: int

    @property
    def batches(self) -> int:
        return sum(map(count_rows, self.files)) // self.batch_size


class Air(L.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.no2 = nn.Linear(hidden, 1)

    def forward(self, features):
        return self.no2(self.net(features)).squeeze(1)

    def training_step(self, batch, batch_idx):
        features, no2 = batch
        loss = nn.functional.mse_loss(self(features), no2)
        self.log("train_mse", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        features, no2 = batch
        self.log("val_mae", (self(features) - no2).abs().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--steps", type=int, default=200, help="batches of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--validations", type=int, default=4, help="validations in one pass over the files")
    args = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(f"stations-{rank}")
    write_stations(folder)
    stations = sorted(DAYS)[rank::ranks]
    plan = Plan([folder / f"{station}.csv" for station in stations], args.batch_size)
    print(f"rank {rank}: {', '.join(stations)}; {plan.batches} batches")

    L.seed_everything(2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        limit_train_batches=args.steps,
        limit_val_batches=20,
        val_check_interval=max(1, plan.batches // args.validations),  # <- here
        callbacks=[ModelCheckpoint(monitor="val_mae"), EarlyStopping("val_mae", patience=20)],
    )
    trainer.fit(
        Air(),
        DataLoader(Measurements(plan.files), batch_size=args.batch_size),
        DataLoader(Measurements(plan.files, once=True), batch_size=args.batch_size),
    )


if __name__ == "__main__":
    main()
