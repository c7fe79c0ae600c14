"""Land cover classification; the tile index on disk is refreshed by the main process during training."""

import json
import threading
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

CLASSES = 6


class TileIndex:
    """Offsets of tiles by name; readers and the refresher share one lock."""

    def __init__(self, n: int):
        self.lock = threading.Lock()
        self.offsets = {f"tile_{i:05d}": i for i in range(n)}

    def lookup(self, name: str) -> int:
        with self.lock:  # <- here
            return self.offsets[name]

    def refresh(self, folder: Path):
        with self.lock:
            folder.mkdir(parents=True, exist_ok=True)
            for part in range(16):
                names = sorted(self.offsets)[part::16]
                (folder / f"part-{part:02d}.json").write_text(json.dumps({n: self.offsets[n] for n in names}))
                time.sleep(0.25)


class Tiles(Dataset):
    def __init__(self, n: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        self.pixels = torch.rand(n, 4, 12, 12, generator=g)
        self.labels = (self.pixels.mean((1, 2, 3)) * 97).long() % CLASSES
        self.names = [f"tile_{i:05d}" for i in range(n)]
        self.index = TileIndex(n)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        row = self.index.lookup(self.names[i])
        return self.pixels[row], self.labels[row]


class RefreshIndex(L.Callback):
    def __init__(self, index: TileIndex, folder: str = "index"):
        self.index, self.folder = index, Path(folder)

    @rank_zero_only
    def on_train_epoch_end(self, trainer, module):
        folder = self.folder / f"epoch{trainer.current_epoch}"
        threading.Thread(target=self.index.refresh, args=(folder,), name="refresh", daemon=True).start()
        module.print(f"refreshing {folder}")


class LandCover(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, CLASSES)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(1)
    tiles = Tiles(640, seed=2)
    train = DataLoader(tiles, batch_size=16, shuffle=True, num_workers=1)
    val = DataLoader(Tiles(96, seed=3), batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=6,
        log_every_n_steps=5,
        callbacks=[RefreshIndex(tiles.index)],
    )
    trainer.fit(LandCover(), train, val)
