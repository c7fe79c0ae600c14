import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Articles(Dataset):
    def __init__(self, vectors, slow_first: float = 0.0):
        self.vectors, self.slow_first = vectors, slow_first
        self.cached = set()

    def __len__(self):
        return len(self.vectors)

    def __getitem__(self, i):
        if i not in self.cached:
            time.sleep(self.slow_first)
            self.cached.add(i)
        v = self.vectors[i]
        return v, v.sum().sign().clamp(min=0)


class NewsData(L.LightningDataModule):
    def __init__(self, path: str = "articles.pt", n: int = 480, batch_size: int = 8, read_seconds: float = 0.02):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        vectors = torch.randn(self.hparams.n, 64)
        time.sleep(8)
        torch.save(vectors, self.hparams.path)

    def setup(self, stage):
        vectors = torch.load(Path(self.hparams.path))
        cut = len(vectors) * 4 // 5
        self.train = Articles(vectors[:cut], self.hparams.read_seconds)
        self.val = Articles(vectors[cut:], 2 * self.hparams.read_seconds)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)
