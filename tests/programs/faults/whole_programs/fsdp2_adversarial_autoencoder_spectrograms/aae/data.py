import math

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

RECORDERS = {"studio": 0.05, "phone": 0.3, "street": 0.8}


class Spectra(Dataset):
    """Synthetic mel spectra of three kinds of recorders, ordered by session as they come off the disk."""

    def __init__(self, per_recorder=400, bins=80, seed=2):
        g = torch.Generator().manual_seed(seed)
        axis = torch.linspace(0, 1, bins)
        rows = []
        for noise in RECORDERS.values():
            f = torch.rand(per_recorder, 1, generator=g) * 6 + 1
            phase = torch.rand(per_recorder, 1, generator=g) * math.pi
            rows.append(
                torch.sin(2 * math.pi * f * axis + phase) + noise * torch.randn(per_recorder, bins, generator=g)
            )
        self.rows = torch.cat(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class SpectraData(L.LightningDataModule):
    def __init__(self, batch_size=20, per_recorder=400):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        self.spectra = Spectra(self.hparams.per_recorder)

    def train_dataloader(self):
        return DataLoader(self.spectra, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)
