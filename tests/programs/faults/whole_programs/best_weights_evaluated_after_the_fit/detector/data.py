import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Boxes(Dataset):
    """Grey images with one rectangle; boxes are (cx, cy, w, h), relative to the image."""

    def __init__(self, first: int, size: int, side: int = 20):
        self.first, self.size, self.side = first, size, side

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(self.first + i)
        w, h = (torch.randint(4, 10, (2,), generator=gen)).tolist()
        x, y = (
            int(torch.randint(0, self.side - w, (1,), generator=gen)),
            int(torch.randint(0, self.side - h, (1,), generator=gen)),
        )
        image = 0.3 * torch.rand(1, self.side, self.side, generator=gen)
        image[:, y : y + h, x : x + w] += 0.7
        return image, torch.tensor([x + w / 2, y + h / 2, w, h]) / self.side


class BoxData(L.LightningDataModule):
    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.train, self.val, self.test = Boxes(0, 1600), Boxes(50_000, 160), Boxes(90_000, 160)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, self.batch_size)
