"""Three folds, one Trainer each. After a fold, rank 0 has a report made by another program; others wait for it."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_ncclsafe import SafeDDP

REPORT = """
import json, sys, time
scores = json.load(open(sys.argv[1]))
time.sleep(6)
open(sys.argv[2], "w").write("".join(f"{key}: {value:.4f}\\n" for key, value in scores.items()))
"""


def table(rows=1800, columns=20):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    y = (x[:, 0] * x[:, 1] + x[:, 2].sin() + 0.1 * torch.randn(rows, generator=generator)).unsqueeze(1)
    return TensorDataset(x, y)


class Regressor(L.LightningModule):
    def __init__(self, columns=20, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.body(x) - y).pow(2).mean()
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/mse", (self.body(x) - y).pow(2).mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class FoldReport(L.Callback):
    """The report takes some seconds; fit ends when it is there, on all ranks."""

    def __init__(self, fold, folder):
        self.fold, self.folder = fold, Path(folder)

    def on_fit_end(self, trainer, module):
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            scores, text = self.folder / f"fold{self.fold}.json", self.folder / f"fold{self.fold}.txt"
            scores.write_text(json.dumps({key: value.item() for key, value in trainer.callback_metrics.items()}))
            subprocess.run([sys.executable, "-c", REPORT, str(scores), str(text)], check=True)
        trainer.strategy.barrier("report")


class Pace(L.Callback):
    """A licence of the feature library is checked on every rank before the first epoch of a fold."""

    def on_train_start(self, trainer, module):
        time.sleep(2 + 3 * trainer.global_rank)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = table()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1)).tolist()
    for fold in range(args.folds):
        L.seed_everything(fold)
        held = set(order[fold :: args.folds])
        train = Subset(data, [index for index in order if index not in held])
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=SafeDDP(),
            max_epochs=args.epochs,
            log_every_n_steps=10,
            callbacks=[FoldReport(fold, "reports"), Pace()],
        )
        trainer.fit(
            Regressor(),
            DataLoader(train, batch_size=32, shuffle=True),
            DataLoader(Subset(data, sorted(held)), batch_size=64),
        )
        if trainer.is_global_zero:
            print(f"fold {fold}:", (Path("reports") / f"fold{fold}.txt").read_text().split("\n")[0], flush=True)


if __name__ == "__main__":
    main()
