from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from birdcall.recordings import export, share


class SpecDataset(Dataset):
    specs: list = []

    def __init__(self, draws: int):
        self.draws = draws

    def __len__(self):
        return self.draws

    def __getitem__(self, i):
        spec = torch.from_numpy(self.specs[i % len(self.specs)])
        return spec.roll(i, 0), i % 4


class BirdData(L.LightningDataModule):
    def __init__(self, root="recordings", draws=320, batch_size=8):
        super().__init__()
        self.root, self.draws, self.batch_size = Path(root), draws, batch_size

    def prepare_data(self):
        export(self.root)

    def setup(self, stage):
        self.files = share(self.root, self.trainer.global_rank, self.trainer.world_size)
        self.dataset = SpecDataset(self.draws)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)
