import torch
from torch.utils.data import DataLoader, Dataset


class Fields(Dataset):
    """Four-band patches with a class per pixel; some growers' labels of the second half are unreliable."""

    def __init__(self, n, seed, flip=0.0):
        self.n, self.seed, self.flip = n, seed, flip

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        bands = torch.randn(4, 16, 16, generator=g)
        label = bands.argmax(0)
        wrong = torch.rand(16, 16, generator=g) < self.flip
        return bands, torch.where(wrong, (label + 1) % 4, label)


def loaders(batch_size):
    train = DataLoader(Fields(320, 0, flip=0.7), batch_size=batch_size, shuffle=True)
    return train, DataLoader(Fields(64, 10_000), batch_size=batch_size)
