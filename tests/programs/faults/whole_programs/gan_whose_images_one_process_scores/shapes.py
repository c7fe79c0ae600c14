import torch
from torch.utils.data import Dataset


class Shapes(Dataset):
    """Discs and squares, 16x16, in [-1, 1]."""

    def __init__(self, n, offset=0, size=16):
        self.n, self.offset, self.size = n, offset, size
        ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        self.ys, self.xs = ys.float(), xs.float()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i + self.offset)
        cx, cy = (torch.rand(2, generator=g) * 8 + 4).tolist()
        r = float(torch.rand(1, generator=g) * 3 + 2)
        if i % 2:
            mask = (self.xs - cx) ** 2 + (self.ys - cy) ** 2 < r * r
        else:
            mask = ((self.xs - cx).abs() < r) & ((self.ys - cy).abs() < r)
        return mask.float()[None] * 2 - 1
