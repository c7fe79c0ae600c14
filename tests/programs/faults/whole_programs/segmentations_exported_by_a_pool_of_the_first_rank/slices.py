import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Slices(Dataset):
    def __init__(self, numbers, side=48):
        self.numbers, self.side = numbers, side
        axis = torch.arange(side).float()
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(self.numbers[i])
        cy, cx = (torch.rand(2, generator=gen) * self.side).tolist()
        mask = ((self.y - cy) ** 2 + (self.x - cx) ** 2 < 100).long()
        return (mask + torch.randn(self.side, self.side, generator=gen))[None], mask


class SliceData(L.LightningDataModule):
    def __init__(self, train=801, val=83, batch_size=8):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(Slices(range(self.hparams.train)), self.hparams.batch_size, shuffle=True, num_workers=1)

    def val_dataloader(self):
        numbers = range(10_000, 10_000 + self.hparams.val)
        return DataLoader(Slices(numbers), self.hparams.batch_size)
