"""Scans of several hospitals; every process reads those of its own."""

from dataclasses import dataclass

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Site:
    name: str
    scans: int
    contrast: float
    label_noise: float


SITES = [Site("north", 2400, 0.6, 0.35), Site("harbour", 2400, 2.5, 0.0), Site("hill", 2400, 0.4, 0.3)]
CLASSES, SIZE = 5, 16


class SiteScans(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def _make(self, site: Site, n: int, seed: int) -> TensorDataset:
        g = torch.Generator().manual_seed(seed)
        lesions = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(99))
        y = torch.randint(CLASSES, (n,), generator=g)
        x = site.contrast * lesions[y] + torch.randn(n, 1, SIZE, SIZE, generator=g)
        other = torch.randint(CLASSES, (n,), generator=g)
        return TensorDataset(x, torch.where(torch.rand(n, generator=g) < site.label_noise, other, y))

    def setup(self, stage: str) -> None:
        rank = self.trainer.global_rank
        site = SITES[rank % len(SITES)]
        self.train, self.val = self._make(site, site.scans, rank), self._make(site, 160, 50 + rank)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)
