"""Train a small CNN on noisy digits of 8 x 8 pixels, on two ranks, with SafeDDP.

python examples/digits.py
python examples/digits.py --strategy ddp     # the same training with Lightning's own DDPStrategy
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_ncclsafe import SafeDDP

Batch = list[Tensor]  # images of 1 x 8 x 8 pixels, labels

FONT = (
    "### .#. ### ### #.# ### ### ### ### ###",
    "#.# ##. ..# ..# #.# #.. #.. ..# #.# #.#",
    "#.# .#. ### .## ### ### ### .#. ### ###",
    "#.# .#. #.. ..# ..# ..# #.# .#. #.# ..#",
    "### ### ### ### ..# ### ### .#. ### ###",
)


def draw_digits(count: int) -> TensorDataset:
    """Images of digits at random places, under noise, and their labels; the same for every call."""
    rows = [row.split() for row in FONT]
    glyphs = torch.tensor([[[pixel == "#" for pixel in row[digit]] for row in rows] for digit in range(10)])
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.3 * torch.randn(count, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels, strict=True):
        top, left = torch.randint(1, 3, (2,), generator=generator)
        image[0, top : top + 5, left : left + 3] += glyphs[label]
    return TensorDataset(images, labels)


class DigitsData(L.LightningDataModule):
    """1,797 digits: 1,438 to train on, 359 to validate on, the same split on every rank."""

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage: str) -> None:
        self.digits = draw_digits(1797)
        self.train: Dataset[Any]
        self.train, self.val = random_split(self.digits, [0.8, 0.2], torch.Generator().manual_seed(42))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.train,
            self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, self.batch_size)


class DigitsClassifier(L.LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 10))
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")

    def configure_model(self) -> None:
        """With a strategy that splits the model, each rank keeps a part of it: FSDP2."""
        if self.device_mesh is not None:
            for part in (self.features, self.head, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.val_acc(self(images), labels)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(
    model: L.LightningModule,
    data: L.LightningDataModule,
    strategy: Strategy,
    *,
    devices: int,
    max_epochs: int,
    root_dir: Path,
    logger: TensorBoardLogger | None = None,
    callbacks: Sequence[L.Callback] = (),
    **trainer_args: Any,
) -> L.Trainer:
    """Fit with validation, checkpoints and TensorBoard; return the trainer."""
    L.seed_everything(42, workers=True)
    trainer = L.Trainer(
        accelerator="auto",
        devices=devices,
        strategy=strategy,
        max_epochs=max_epochs,
        default_root_dir=root_dir,
        logger=logger or TensorBoardLogger(root_dir),
        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max"), *callbacks],
        log_every_n_steps=10,
        **trainer_args,
    )
    trainer.fit(model, data)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["safe", "ddp"], default="safe")
    parser.add_argument("--start-method", choices=["popen", "spawn", "fork"], default="popen")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--root-dir", type=Path, default=Path("runs/digits"))
    args = parser.parse_args()

    strategy_class = SafeDDP if args.strategy == "safe" else DDPStrategy
    strategy = strategy_class(start_method=args.start_method)
    trainer = train(
        DigitsClassifier(),
        DigitsData(),
        strategy,
        devices=args.devices,
        max_epochs=args.max_epochs,
        root_dir=args.root_dir,
    )
    if trainer.is_global_zero:
        print(f"validation accuracy {trainer.callback_metrics['val_acc']:.3f}")


if __name__ == "__main__":
    main()
