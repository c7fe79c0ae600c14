"""Grouped 4-fold cross validation of a small MLP; patients never appear in two folds."""

import csv
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_ncclsafe import SafeDDP

FOLDS = 4


def patients(n: int = 97, seed: int = 0) -> tuple[TensorDataset, np.ndarray]:
    rng = np.random.default_rng(seed)
    visits = rng.integers(5, 60, n)
    group = np.repeat(np.arange(n), visits)
    bias = rng.normal(size=(n, 1))[group]
    x = rng.normal(size=(len(group), 24)) + 0.5 * bias
    y = (x[:, :4].sum(1) + rng.normal(size=len(group)) > 0).astype(np.int64)
    return TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y)), group


def folds(group: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # the first fold is the pilot study and much smaller
    edges = [0, 8, 40, 70, group.max() + 1]
    for low, high in pairwise(edges):
        held_out = (group >= low) & (group < high)
        yield np.flatnonzero(~held_out), np.flatnonzero(held_out)


class MLP(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(24, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, 2))

    def _step(self, batch: list[Tensor], name: str) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_acc": accuracy}, sync_dist=name != "train", prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._step(batch, "val")

    def test_step(self, batch, batch_idx):
        self._step(batch, "test")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def run_fold(k: int, data: TensorDataset, train: np.ndarray, test: np.ndarray) -> dict[str, float]:
    checkpoint = ModelCheckpoint(monitor="val_loss", filename=f"fold{k}")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=4,
        logger=CSVLogger("cv", name=f"fold{k}"),
        callbacks=[EarlyStopping("val_loss", patience=1), checkpoint],
        log_every_n_steps=5,
    )
    split = np.random.default_rng(k).permutation(train)
    cut = len(split) // 8
    model = MLP(width=32 * (k + 1))
    trainer.fit(
        model,
        DataLoader(Subset(data, split[cut:]), batch_size=16, shuffle=True),
        DataLoader(Subset(data, split[:cut]), batch_size=16),
    )
    (result,) = trainer.test(model, DataLoader(Subset(data, test), batch_size=16), ckpt_path="best")
    return {"fold": k, "epochs": trainer.current_epoch, **result}


def main() -> None:
    L.seed_everything(31)
    data, group = patients()
    rows = []
    for k, (train, test) in enumerate(folds(group)):
        rows.append(run_fold(k, data, train, test))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank == 0:
        with Path("folds.csv").open("w", newline="") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        time.sleep(5)  # the shared folder shows new files a little later
        print(Path("folds.csv").read_text())


if __name__ == "__main__":
    main()
