import math

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


def spirals(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = r * 4 + y * 2 * math.pi / 3
    x = torch.stack([r * a.cos(), r * a.sin()], 1) + noise * torch.randn(n, 2, generator=g)
    return TensorDataset(x, y)


class SpiralData(L.LightningDataModule):
    def __init__(self, size: int = 2400, batch_size: int = 20, noise: float = 0.03):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(spirals(self.hparams.size, 0, self.hparams.noise), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(spirals(400, 1, self.hparams.noise), 50)
