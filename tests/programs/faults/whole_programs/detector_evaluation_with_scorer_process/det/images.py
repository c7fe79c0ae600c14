import torch
from torch.utils.data import Dataset


class Images(Dataset):
    """Site A has one object per image, centred; site B has objects in the lower right corner."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.seed * 100_000 + index)
        image = torch.randn(1, 24, 24, generator=g) * 0.1
        x, y = torch.randint(1, 10, (2,), generator=g).tolist()
        w, h = torch.randint(6, 12, (2,), generator=g).tolist()
        image[0, y : y + h, x : x + w] += 1
        if index % 2:
            image = image * 40  # 12-bit cameras
        return image, torch.tensor([x, y, x + w, y + h]) / 24
