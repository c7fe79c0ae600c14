"""Segmentation of slides. Rank 0 archives example masks; the first epoch fills a cache of decoded tiles."""

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryJaccardIndex

from lightning_ncclsafe import SafeDDP

TILE = 24


class CachedTiles(Dataset):
    """Decodes a tile once and keeps it on disk."""

    def __init__(self, n: int, cache: str, decode_seconds: float) -> None:
        self.n, self.cache, self.decode_seconds = n, Path(cache), decode_seconds
        self.cache.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return self.n

    def decode(self, i: int) -> np.ndarray:
        time.sleep(self.decode_seconds * (4.0 if i % 9 == 4 else 1.0))
        rng = np.random.default_rng(i)
        image = rng.normal(size=(TILE, TILE)).astype(np.float32)
        x, y = rng.integers(4, TILE - 4, size=2)
        image[x - 4 : x + 4, y - 4 : y + 4] += 2.0
        return image

    def __getitem__(self, i: int):
        file = self.cache / (hashlib.sha1(str(i).encode()).hexdigest()[:12] + ".npy")
        if file.exists():
            image = np.load(file)
        else:
            image = self.decode(i)
            np.save(file, image)
        image = torch.from_numpy(image)[None]
        return image, (F.avg_pool2d(image[None], 5, 1, 2)[0] > 0.8).float()


class Segmenter(L.LightningModule):
    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 5, padding=2))
        self.iou = BinaryJaccardIndex()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        image, mask = batch
        loss = F.binary_cross_entropy_with_logits(self(image), mask)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        image, mask = batch
        self.iou.update(self(image), mask.int())
        self.log("val_iou", self.iou, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class MaskArchive(L.Callback):
    """After each epoch, rank 0 packs the state of the model with an external tool and checks the archive."""

    PACK = (
        "import sys, tarfile, time; t = tarfile.open(sys.argv[1], 'w:gz'); t.add(sys.argv[2]); t.close(); time.sleep(9)"
    )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            folder = Path("archive")
            folder.mkdir(exist_ok=True)
            weights = folder / f"epoch{trainer.current_epoch}.pt"
            torch.save(pl_module.state_dict(), weights)
            subprocess.run([sys.executable, "-c", self.PACK, f"{weights}.tar.gz", str(weights)], check=True)
        dist.barrier()


class DiskUsage(threading.Thread):
    def __init__(self, folder: str) -> None:
        super().__init__(daemon=True, name="disk-usage")
        self.folder, self.done, self.peak = Path(folder), threading.Event(), 0

    def run(self) -> None:
        while not self.done.wait(1.0):
            self.peak = max(self.peak, sum(f.stat().st_size for f in self.folder.glob("*.npy")))


def main() -> None:
    L.seed_everything(4)
    train, val = CachedTiles(180, "cache/train", 0.08), CachedTiles(45, "cache/val", 0.05)
    usage = DiskUsage("cache/train")
    usage.start()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=3, callbacks=[MaskArchive()], log_every_n_steps=5
    )
    trainer.fit(Segmenter(), DataLoader(train, batch_size=6, shuffle=True), DataLoader(val, batch_size=6))
    usage.done.set()
    print(f"cache: {usage.peak / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
