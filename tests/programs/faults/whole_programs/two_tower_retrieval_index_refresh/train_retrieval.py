"""Two-tower retrieval. After every epoch the index of items is rebuilt, and hard negatives are drawn from it."""

import argparse
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
from control import ControlPlane
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

USERS, ITEMS = 2000, 1200


class Interactions(Dataset):
    def __init__(self, n: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.user = torch.from_numpy(rng.integers(USERS, size=n))
        self.item = (self.user * 7 + torch.from_numpy(rng.integers(5, size=n))) % ITEMS

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, i: int):
        return self.user[i], self.item[i]


class ItemIndex:
    """An exact index with a pruning pass; the pass is slower the more items have moved since the last build."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.last: np.ndarray | None = None

    def build(self, vectors: np.ndarray, version: int) -> Path:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        moved = len(unit) if self.last is None else int(np.any(unit != self.last, axis=1).sum())
        neighbours = np.empty((len(unit), 8), dtype=np.int64)
        for start in range(0, len(unit), 100):
            scores = unit[start : start + 100] @ unit.T
            neighbours[start : start + 100] = np.argsort(-scores, axis=1)[:, 1:9]
            time.sleep(0.3 if version == 0 else 2.0 * moved / len(unit))
        self.last = unit
        file = self.folder / f"neighbours-{version:03d}.npy"
        np.save(file, neighbours)
        return file


class TwoTower(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.project = nn.Linear(width, width)
        self.neighbours: torch.Tensor | None = None
        self.control: ControlPlane | None = None
        self.index: ItemIndex | None = None

    def on_fit_start(self) -> None:
        self.control = ControlPlane()
        self.index = ItemIndex("index")

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        user, item = batch
        query, keys = self.project(self.users(user)), self.items(item)
        logits = query @ keys.T
        loss = F.cross_entropy(logits, torch.arange(len(user)))
        if self.neighbours is not None:
            hard = self.items(self.neighbours[item, torch.randint(8, (len(item),))])
            margin = (query * keys).sum(1) - (query * hard).sum(1)
            loss = loss + 0.2 * F.relu(1.0 - margin).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        message = None
        if self.global_rank == 0:
            version = self.current_epoch
            file = self.index.build(self.items.weight.detach().numpy(), version)
            message = {"version": version, "file": str(file)}
        message = self.control.publish(message)
        self.neighbours = torch.from_numpy(np.load(message["file"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    L.seed_everything(19)
    loader = DataLoader(Interactions(3200, seed=0), batch_size=args.batch_size, shuffle=True)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(TwoTower(), loader)


if __name__ == "__main__":
    main()
