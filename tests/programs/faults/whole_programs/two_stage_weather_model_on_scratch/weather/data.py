import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Reanalysis(L.LightningDataModule):
    """Advected fields on a small grid; lead selects how far ahead the target lies."""

    def __init__(self, n=1600, grid=16, lead=1, batch_size=16):
        super().__init__()
        self.n, self.grid, self.lead, self.batch_size = n, grid, lead, batch_size

    def fields(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        now = torch.nn.functional.avg_pool2d(torch.randn(n, 2, self.grid, self.grid, generator=g), 3, 1, 1)
        return TensorDataset(now, now.roll(self.lead, dims=-1) * 0.9)

    def setup(self, stage):
        self.train, self.val = self.fields(self.n, 0), self.fields(self.n // 10, 1)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)
