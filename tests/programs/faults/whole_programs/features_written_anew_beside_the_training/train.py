import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, RichModelSummary
from slices import COUNT, SliceCache, Slices
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


class LesionNet(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=4),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 1),
        )

    def step(self, batch, name):
        slices, lesions = batch
        loss = F.binary_cross_entropy_with_logits(self.net(slices).squeeze(1), lesions.float())
        self.log(f"{name}_loss", loss, prog_bar=True, sync_dist=name == "val")
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class KeepCalibrated(Callback):
    """Denoises a site's slices again if its scanner was calibrated since; training goes on meanwhile."""

    def __init__(self, cache: SliceCache, passes: int) -> None:
        self.cache, self.passes = cache, passes
        self.thread = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch > 0 and self.thread is None and self.cache.outdated:
            print(f"{self.cache.site}: new calibration, {self.passes} passes")
            self.thread = self.cache.build_in_background(self.passes)


def loader(cache: SliceCache, indices: range, args: argparse.Namespace, shuffle: bool) -> DataLoader:
    return DataLoader(
        Slices(cache, indices),
        batch_size=args.batch_size,
        shuffle=shuffle,
        num_workers=args.workers,
        persistent_workers=True,
        drop_last=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=lambda text: text.split(","), required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    # every rank trains on the scans of its site
    site = args.sites[int(os.environ.get("RANK", "0"))]
    cache = SliceCache(Path("cache"), site)
    cache.build()

    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=len(args.sites),
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        callbacks=[KeepCalibrated(cache, args.passes), RichModelSummary()],
    )
    train = loader(cache, range(COUNT - 80), args, shuffle=True)
    val = loader(cache, range(COUNT - 80, COUNT), args, shuffle=False)
    trainer.fit(LesionNet(args.lr), train, val)


if __name__ == "__main__":
    main()
