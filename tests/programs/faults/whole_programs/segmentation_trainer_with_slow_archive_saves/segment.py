"""Segmentation of synthetic scans; checkpoints are packed into a compressed archive by rank 0."""

import argparse
import io
import threading
import time
import zipfile
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Scans(Dataset):
    def __init__(self, count: int, size: int = 24, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(count, 1, size, size, generator=generator)
        self.masks = (F.avg_pool2d(self.images, 3, 1, 1) > 0.5).float()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


class Archive(Callback):
    """Packs the weights and sample predictions of an epoch, block by block at the archive's pace."""

    def __init__(self, path: Path, blocks: int = 12, pace: float = 1.0):
        self.path = path
        self.blocks = blocks
        self.pace = pace

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if not trainer.is_global_zero or trainer.current_epoch != 1:
            return
        buffer = io.BytesIO()
        torch.save(pl_module.state_dict(), buffer)
        data = buffer.getvalue()
        step = len(data) // self.blocks + 1
        with zipfile.ZipFile(self.path, "a", zipfile.ZIP_DEFLATED) as archive:
            for block in range(self.blocks):
                name = f"epoch{trainer.current_epoch}/{block:03d}"
                archive.writestr(name, data[block * step : (block + 1) * step])
                time.sleep(self.pace)


class DiskMonitor(Callback):
    """Notes the size of the run's folder every second."""

    def on_fit_start(self, trainer, pl_module):
        self.done = threading.Event()
        self.sizes = []
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.done.wait(1.0):
            self.sizes.append(sum(f.stat().st_size for f in Path(".").glob("*.zip")))

    def on_fit_end(self, trainer, pl_module):
        self.done.set()
        self.thread.join()


class SegmentationNet(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 1, 1),
        )

    def training_step(self, batch, batch_idx):
        images, masks = batch
        loss = F.binary_cross_entropy_with_logits(self.net(images), masks)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        predicted = (self.net(images) > 0).float()
        dice = 2 * (predicted * masks).sum() / (predicted.sum() + masks.sum()).clamp(min=1)
        self.log("val/dice", dice, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--archive", type=Path, default=Path("weights.zip"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(9)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[Archive(args.archive), DiskMonitor()],
        log_every_n_steps=10,
    )
    train = DataLoader(Scans(480), batch_size=8, shuffle=True)
    val = DataLoader(Scans(64, seed=1), batch_size=8)
    trainer.fit(SegmentationNet(), train, val)


if __name__ == "__main__":
    main()
