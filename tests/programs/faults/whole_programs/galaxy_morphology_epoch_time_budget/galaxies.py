import torch
from torch.utils.data import Dataset


class Galaxies(Dataset):
    """Synthetic stamps: ellipticals, spirals and edge-on discs."""

    def __init__(self, size, seed, pixels=24):
        self.size, self.seed = size, seed
        axis = torch.linspace(-1, 1, pixels)
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        kind = int(torch.randint(3, (1,), generator=g))
        angle = float(torch.rand(1, generator=g)) * 3.14159
        u = self.x * torch.cos(torch.tensor(angle)) + self.y * torch.sin(torch.tensor(angle))
        v = -self.x * torch.sin(torch.tensor(angle)) + self.y * torch.cos(torch.tensor(angle))
        flat = [1.0, 1.3, 5.0][kind]
        r = (u**2 + (flat * v) ** 2).sqrt()
        image = torch.exp(-4 * r)
        if kind == 1:
            image = image * (1 + 0.5 * torch.sin(3 * torch.atan2(v, u) + 8 * r))
        return (image + 0.05 * torch.randn(image.shape, generator=g))[None], kind
