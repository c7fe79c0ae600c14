"""Linear probe and finetuning on a folder of images that is decoded once."""

import argparse
import io
import tempfile
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


def write_images(folder, n, seed=0):
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        path = folder / f"{i:05d}_{i % 5}.png"
        if path.exists():
            continue
        size = 1400 if i % 160 == 81 else 64
        pixels = rng.integers(0, 60, (size, size, 3), dtype=np.uint8)
        pixels[..., i % 3] += np.uint8(40 * (i % 5))
        Image.fromarray(pixels).save(path)


class CachedFolder(Dataset):
    """Decodes an image when it is first asked for, and keeps the tensor."""

    def __init__(self, folder, size=32):
        self.paths, self.size = sorted(folder.glob("*.png")), size
        self.cache = {}

    def __len__(self):
        return len(self.paths)

    def decode(self, path):
        image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        if image.width > 1000:
            # scans: denoise before they are made smaller
            for _ in range(12):
                image = image.resize((image.width, image.height), Image.LANCZOS, (1, 1, image.width, image.height))
        image = image.resize((self.size, self.size), Image.BICUBIC)
        return torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1) / 127.5 - 1

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = self.decode(self.paths[i])
        return self.cache[i], int(self.paths[i].stem.split("_")[1])


class Probe(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Linear(32, 5)
        self.started = time.monotonic()

    def setup(self, stage):
        # gloo group for timings; statistics travel apart from gradients
        self.stats = dist.new_group(backend="gloo")

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_start(self):
        self.started = time.monotonic()

    def on_train_epoch_end(self):
        seconds = torch.tensor([time.monotonic() - self.started])
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self.stats)
        self.print(f"epoch {self.current_epoch} took {seconds.item():.1f} s")

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    L.seed_everything(8)
    root = Path(tempfile.gettempdir()) / f"probe_images_{args.images}"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=CSVLogger("csv"),
        callbacks=[ModelCheckpoint(monitor="acc", mode="max"), BackboneFinetuning(unfreeze_backbone_at_epoch=2)],
        log_every_n_steps=10,
    )
    if trainer.is_global_zero:
        write_images(root / "train", args.images)
        write_images(root / "val", 160, seed=1)
    trainer.strategy.barrier()
    ready = root / "val" / "00159_4.png"
    while not ready.exists():
        time.sleep(0.2)
    train = DataLoader(CachedFolder(root / "train"), batch_size=16, shuffle=False)
    trainer.fit(Probe(), train, DataLoader(CachedFolder(root / "val"), batch_size=16))


if __name__ == "__main__":
    main()
