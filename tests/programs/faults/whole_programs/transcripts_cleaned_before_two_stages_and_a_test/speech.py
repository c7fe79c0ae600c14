"""Keyword scores from speech: an encoder that is frozen at first, and a head."""

import json
import random
import time
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

KEYWORDS = 6


def clean(text: str) -> str:
    time.sleep(0.01)  # a call of the normaliser, an external program
    return " ".join(text.lower().split())


def read_patiently(path: Path, attempts: int = 5) -> list[dict]:
    """The share is not always up to date at once."""
    for attempt in range(attempts):
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError) as error:
            print(f"attempt {attempt}: {error}")
            time.sleep(0.5 * 2**attempt)
    raise FileNotFoundError(path)


class Clips(Dataset):
    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        row = self.rows[i]
        generator = torch.Generator().manual_seed(row["id"])
        x = torch.randn(20, 50, generator=generator)
        x[row["keyword"] * 3] += 1.5
        return x, row["keyword"]


class SpeechData(L.LightningDataModule):
    def __init__(self, root: Path, n: int = 701, batch_size: int = 8) -> None:
        super().__init__()
        self.root, self.n, self.batch_size = root, n, batch_size

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    def prepare_data(self) -> None:
        if self.manifest.exists():
            return
        rng = random.Random(0)
        rows = [
            {"id": i, "keyword": rng.randrange(KEYWORDS), "text": clean("  Turn ON   the light ")}
            for i in range(self.n)
        ]
        self.root.mkdir(parents=True, exist_ok=True)
        self.manifest.write_text(json.dumps(rows))

    def setup(self, stage: str) -> None:
        rows = read_patiently(self.manifest)
        self.splits = {"fit": Clips(rows[:-101]), "val": Clips(rows[-101:-50]), "test": Clips(rows[-50:])}

    def train_dataloader(self):
        return DataLoader(self.splits["fit"], self.batch_size, shuffle=True, drop_last=True, num_workers=1)

    def val_dataloader(self):
        return DataLoader(self.splits["val"], self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.splits["test"], self.batch_size)


class Keywords(L.LightningModule):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Conv1d(20, 32, 5, stride=2), nn.ReLU(), nn.Conv1d(32, 32, 5), nn.ReLU())
        self.head = nn.Linear(32, KEYWORDS)

    def freeze_encoder(self, frozen: bool) -> None:
        self.encoder.requires_grad_(not frozen)

    def forward(self, x):
        return self.head(self.encoder(x).mean(-1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Confusion(Callback):
    """Rank 0 counts what it confuses in its own share, and writes a table."""

    def on_validation_epoch_start(self, trainer, pl_module):
        self.table = torch.zeros(KEYWORDS, KEYWORDS, dtype=torch.long)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if trainer.is_global_zero:
            with torch.no_grad():
                x, y = batch
                guess = pl_module(x).argmax(1)
            self.table.index_put_((y, guess), torch.ones_like(y), accumulate=True)

    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            time.sleep(1.5)  # the plotting library takes its time
            Path(f"confusion_{trainer.global_step}.txt").write_text(str(self.table))
