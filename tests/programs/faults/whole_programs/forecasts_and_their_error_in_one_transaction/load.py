import math

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HOURS = 24


def series(meters: int, days: int) -> torch.Tensor:
    hour = torch.arange(days * HOURS, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    phase = torch.rand(meters, 1, generator=generator) * 2 * math.pi
    level = 1 + torch.rand(meters, 1, generator=generator)
    noise = 0.1 * torch.randn(meters, days * HOURS, generator=generator)
    week = 0.2 * torch.sin(2 * math.pi * hour / (7 * HOURS))
    return level + torch.sin(2 * math.pi * hour / HOURS + phase) + week + noise


class Meters(L.LightningDataModule):
    """Three days before, and the day to forecast."""

    def __init__(self, meters: int = 24, days: int = 120, batch_size: int = 24, past_days: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        data = series(self.hparams.meters, self.hparams.days)
        length = (self.hparams.past_days + 1) * HOURS
        windows = data.unfold(1, length, HOURS)
        meter = torch.arange(len(data))[:, None].expand(windows.shape[:2])
        split = int(0.8 * windows.shape[1])
        self.parts = {
            name: TensorDataset(meter[:, part].flatten(), windows[:, part].flatten(0, 1).clone())
            for name, part in {"train": slice(0, split), "val": slice(split, None)}.items()
        }

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["train"], self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["val"], self.hparams.batch_size)


class Forecaster(L.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.day = nn.Linear(hidden, HOURS)

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(past.unsqueeze(2))
        return self.day(states[:, -1])

    def training_step(self, batch, batch_idx):
        _, window = batch
        loss = nn.functional.smooth_l1_loss(self(window[:, :-HOURS]), window[:, -HOURS:])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        meter, window = batch
        forecast = self(window[:, :-HOURS])
        error = (forecast - window[:, -HOURS:]).abs().mean(dim=1)
        self.log("val_mae", error.mean(), prog_bar=True, sync_dist=True)
        return {"meter": meter, "peak": forecast.max(dim=1).values, "error": error}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}
