"""Fits a model of house prices for every region, and compares them."""

import argparse
import json
import zlib
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanAbsoluteError, R2Score

from lightning_ncclsafe import SafeDDP

FEATURES = 12
HOUSES = {"north": 1310, "east": 2222, "south": 907, "west": 1788}


class Prices(L.LightningDataModule):
    def __init__(self, region: str, batch_size: int = 16) -> None:
        super().__init__()
        self.region, self.batch_size = region, batch_size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(self.region.encode()))
        x = torch.randn(HOUSES[self.region], FEATURES, generator=generator)
        weights = torch.randn(FEATURES, generator=generator)
        y = x @ weights + 0.3 * torch.randn(len(x), generator=generator)
        parts = random_split(TensorDataset(x, y), [0.8, 0.1, 0.1], generator=generator)
        self.train, self.val, self.held_out = parts

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size)


class Regression(L.LightningModule):
    def __init__(self, hidden: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 1))
        self.mae, self.r2 = MeanAbsoluteError(), R2Score()

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.mae(self(x), y)
        self.log("val_mae", self.mae, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.r2.update(self(x), y)
        self.log("test_r2", self.r2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def fit(region: str, args: argparse.Namespace) -> float:
    L.seed_everything(args.seed)
    best = ModelCheckpoint(dirpath=args.output / region, monitor="val_mae", filename="best")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=CSVLogger(args.output, name=region),
        callbacks=[best, EarlyStopping("val_mae", patience=3)],
    )
    data = Prices(region)
    trainer.fit(Regression(args.hidden, args.lr), datamodule=data)
    (scores,) = trainer.test(ckpt_path="best", datamodule=data)
    if trainer.is_global_zero and not args.keep:
        Path(best.best_model_path).unlink(missing_ok=True)
    trainer.strategy.barrier(f"end of {region}")
    return scores["test_r2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--regions", nargs="+", default=list(HOUSES), choices=HOUSES)
    parser.add_argument("--output", type=Path, default=Path("regions"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    args = parser.parse_args()
    scores = {region: fit(region, args) for region in args.regions}
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
