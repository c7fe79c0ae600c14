from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Series(L.LightningDataModule):
    """Load curves of a grid operator, cut into windows by prepare_data."""

    def __init__(self, root="series", meters=24, hours=400, window=48, horizon=8, batch_size=32):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        root = Path(self.hparams.root)
        root.mkdir(exist_ok=True)
        g = torch.Generator().manual_seed(8)
        t = torch.arange(self.hparams.hours) / 24 * 6.28318
        phase = torch.rand(self.hparams.meters, 1, generator=g) * 6.3
        curves = torch.sin(t + phase) + 0.3 * torch.randn(self.hparams.meters, self.hparams.hours, generator=g)
        size = self.hparams.window + self.hparams.horizon
        torch.save(curves.unfold(1, size, 4).reshape(-1, size), root / "windows.pt")

    def setup(self, stage):
        windows = torch.load(Path(self.hparams.root) / "windows.pt")
        x, y = windows.split((self.hparams.window, self.hparams.horizon), 1)
        cut = int(0.9 * len(x))
        self.train, self.val = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)
