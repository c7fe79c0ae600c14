"""Cross-validation of a small box regressor: one Trainer per fold, in the same processes."""

import argparse

import lightning as L
import numpy as np
import torch
from quota import apply_budget
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric

from lightning_ncclsafe import SafeDDP

SIDE = 24


class Scans(Dataset):
    """Pairs of (scan, box). Scans of the old device are noisy and are denoised on the fly."""

    def __init__(self, n: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.corner = rng.integers(2, SIDE - 10, size=(n, 2))
        self.old_device = np.arange(n) % 2 == 1
        self.seeds = rng.integers(1 << 30, size=n)

    def __len__(self) -> int:
        return len(self.corner)

    @staticmethod
    def denoise(scan: np.ndarray, rounds: int) -> np.ndarray:
        for _ in range(rounds):
            padded = np.pad(scan, 1, mode="edge")
            neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
            scan = 0.6 * scan + 0.1 * neighbours
        return scan

    def __getitem__(self, i: int):
        scan = np.random.default_rng(self.seeds[i]).normal(size=(SIDE, SIDE)) * 0.3
        x, y = self.corner[i]
        scan[x : x + 8, y : y + 8] += 1.0
        if self.old_device[i]:
            scan = self.denoise(scan, rounds=160)
        box = torch.tensor([x, y, x + 8, y + 8], dtype=torch.float32) / SIDE
        return torch.from_numpy(scan).float()[None], box


class BoxRegressor(L.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 144, 4), nn.Sigmoid()
        )
        self.error = MeanMetric()

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        scan, box = batch
        loss = F.smooth_l1_loss(self.net(scan), box)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        scan, box = batch
        self.error.update((self.net(scan) - box).abs().mean())
        self.log("val_error", self.error, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Fold(L.LightningDataModule):
    def __init__(self, scans: Scans, fold: int, folds: int, batch_size: int = 8) -> None:
        super().__init__()
        index = np.arange(len(scans))
        held_out = index // 2 % folds == fold
        self.train, self.val = Subset(scans, index[~held_out].tolist()), Subset(scans, index[held_out].tolist())
        self.batch_size = batch_size

    def loader(self, data: Dataset) -> DataLoader:
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.train)

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.val)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--cpu-budget", type=float, default=12.0, help="CPU seconds for all folds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    apply_budget(args.cpu_budget)
    scans, errors = Scans(960), []
    for fold in range(args.folds):
        L.seed_everything(fold, verbose=False)
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=4)
        trainer.fit(BoxRegressor(), datamodule=Fold(scans, fold, args.folds))
        errors.append(float(trainer.callback_metrics["val_error"]))
    print("error per fold:", [round(e, 4) for e in errors])


if __name__ == "__main__":
    main()
