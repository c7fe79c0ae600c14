import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

SCANNERS = {"clinic-a": 96, "clinic-b": 96, "clinic-c": 224}


class Tiles(Dataset):
    """Tiles of one clinic's slides; decoded tiles are kept, since decoding is what costs."""

    def __init__(self, clinic, count=4000):
        self.size = SCANNERS[clinic]
        self.count = count
        self.cache = {}

    def __len__(self):
        return self.count

    def decode(self, index):
        rng = np.random.default_rng(index)
        return rng.random((3, self.size, self.size), dtype="float32") * (1 + index % 4)

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = self.decode(index)
        tile = torch.from_numpy(self.cache[index])
        return torch.nn.functional.adaptive_avg_pool2d(tile, 16), index % 4


class SlideData(L.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        clinics = sorted(SCANNERS)
        self.train = Tiles(clinics[self.trainer.global_rank % len(clinics)])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)
