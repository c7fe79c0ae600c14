from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Views(L.LightningDataModule):
    def __init__(self, root: str = "views", size: int = 1200, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        root = Path(self.hparams.root)
        root.mkdir(exist_ok=True)
        g = torch.Generator().manual_seed(77)
        sharp = torch.rand(self.hparams.size, generator=g)
        sharp[1::2] *= 0.6
        torch.save((torch.randn(self.hparams.size, 24, generator=g), sharp), root / "views.pt")

    def train_dataloader(self):
        views, sharp = torch.load(Path(self.hparams.root) / "views.pt")
        return DataLoader(TensorDataset(views, sharp), self.hparams.batch_size, shuffle=False)
