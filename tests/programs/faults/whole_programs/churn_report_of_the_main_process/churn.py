# Churn prediction on a table with categorical and numerical columns.
#
#   torchrun --nproc-per-node 4 churn.py --rows 24000
import argparse
import csv
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, BinaryF1Score

from lightning_ncclsafe import SafeDDP

CATEGORICAL = {"plan": 4, "region": 12, "channel": 6}
NUMERICAL = ["age", "months", "calls", "minutes", "spend"]


def make_table(rows, seed=0):
    rng = np.random.default_rng(seed)
    table = {name: rng.integers(0, n, rows) for name, n in CATEGORICAL.items()}
    table |= {name: rng.normal(size=rows) for name in NUMERICAL}
    df = pd.DataFrame(table)
    score = df["calls"] - df["months"] + (df["plan"] == 2) * 1.5 + rng.normal(size=rows)
    df["churn"] = (score > 1.0).astype(int)
    return df


class ChurnData(pl.LightningDataModule):
    def __init__(self, rows, batch_size=64):
        super().__init__()
        self.rows, self.batch_size = rows, batch_size
        self.path = Path(tempfile.gettempdir()) / f"churn_{rows}.csv"

    def prepare_data(self):
        if not self.path.exists():
            make_table(self.rows).to_csv(self.path, index=False)

    def setup(self, stage=None):
        df = pd.read_csv(self.path)
        train = df.sample(frac=0.8, random_state=1)
        self.train, self.val = self._tensors(train), self._tensors(df.drop(train.index))

    def _tensors(self, df):
        cat = torch.tensor(df[list(CATEGORICAL)].to_numpy(np.int64))
        num = torch.tensor(df[NUMERICAL].to_numpy(np.float32))
        return TensorDataset(cat, num, torch.tensor(df["churn"].to_numpy(np.int64)))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=256)


class ChurnModel(pl.LightningModule):
    def __init__(self, dim=8, hidden=64, lr=2e-3, dropout=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.ModuleDict({name: nn.Embedding(n, dim) for name, n in CATEGORICAL.items()})
        self.mlp = nn.Sequential(
            nn.Linear(dim * len(CATEGORICAL) + len(NUMERICAL), hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.metrics = MetricCollection({"auroc": BinaryAUROC(), "ap": BinaryAveragePrecision(), "f1": BinaryF1Score()})
        self.report = Path("report.csv")

    def forward(self, cat, num):
        parts = [self.embed[name](cat[:, i]) for i, name in enumerate(CATEGORICAL)]
        return self.mlp(torch.cat([*parts, num], 1)).squeeze(1)

    def training_step(self, batch, _):
        cat, num, y = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(cat, num), y.float())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        cat, num, y = batch
        logits = self(cat, num)
        self.log("val_loss", nn.functional.binary_cross_entropy_with_logits(logits, y.float()), sync_dist=True)
        self.metrics.update(logits.sigmoid(), y)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking and self.global_rank == 0:
            row = {k: round(v.item(), 4) for k, v in self.metrics.compute().items()}  # <- here
            self.write_row(self.current_epoch, row)
        self.metrics.reset()

    def write_row(self, epoch, row):
        new = not self.report.exists()
        with self.report.open("a", newline="") as f:
            writer = csv.DictWriter(f, ["epoch", *row])
            if new:
                writer.writeheader()
            writer.writerow({"epoch": epoch, **row})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    pl.seed_everything(2024)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[EarlyStopping("val_loss", patience=2), ModelCheckpoint(monitor="val_loss")],
    )
    trainer.fit(ChurnModel(), datamodule=ChurnData(args.rows))


if __name__ == "__main__":
    main()
