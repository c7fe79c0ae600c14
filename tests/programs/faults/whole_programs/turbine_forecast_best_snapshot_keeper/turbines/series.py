import math

import torch
from torch.utils.data import DataLoader, Dataset


class PowerCurves(Dataset):
    """Windows of ten-minute power values; the target is the next hour."""

    def __init__(self, turbines: int, hours: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(hours * 6) / 144 * 2 * math.pi
        phase = torch.rand(turbines, 1, generator=g) * 6
        self.power = torch.sin(t + phase) + 0.2 * torch.randn(turbines, len(t), generator=g)
        self.windows = hours * 6 - 54

    def __len__(self):
        return self.windows

    def __getitem__(self, i):
        w = self.power[:, i : i + 54]
        return w[:, :48], w[:, 48:]


def loader(seed: int, hours: int, batch_size: int, shuffle: bool = False):
    return DataLoader(PowerCurves(12, hours, seed), batch_size=batch_size, shuffle=shuffle)
