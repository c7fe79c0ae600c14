import argparse
import atexit
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from checkpoint_io import StoreCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP

LATITUDES, LONGITUDES = 16, 32


def start_store(rate: int) -> str:
    """The store's address; rank 0 starts it for all."""
    port_file = Path("store.port")
    if os.environ.get("RANK", "0") == "0":
        script = Path(__file__).with_name("store.py")
        store = subprocess.Popen([sys.executable, str(script), "objects", str(port_file), "--rate", str(rate)])
        atexit.register(store.kill)
    while not port_file.exists() or not port_file.read_text():
        time.sleep(0.1)
    return f"http://127.0.0.1:{port_file.read_text()}"


def weather(days: int) -> TensorDataset:
    """Fields that drift to the east."""
    generator = torch.Generator().manual_seed(4)
    field = torch.randn(1, LATITUDES, LONGITUDES, generator=generator)
    fields = [field]
    for _ in range(days):
        field = 0.97 * torch.roll(field, 1, dims=2) + 0.1 * torch.randn(field.shape, generator=generator)
        fields.append(field)
    return TensorDataset(torch.stack(fields[:-1]), torch.stack(fields[1:]))


class Emulator(L.LightningModule):
    def __init__(self, width: int, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        cells = LATITUDES * LONGITUDES
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(cells, width), nn.GELU(), nn.Linear(width, cells))

    def forward(self, today):
        return today + self.net(today).view_as(today)

    def training_step(self, batch, batch_idx):
        today, tomorrow = batch
        loss = nn.functional.mse_loss(self(today), tomorrow)
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        today, tomorrow = batch
        self.log("val/mse", nn.functional.mse_loss(self(today), tomorrow), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1800)
    parser.add_argument("--days", type=int, default=2400)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--store-rate", type=int, default=10**8)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    L.seed_everything(12)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        plugins=[StoreCheckpointIO(start_store(args.store_rate), prefix="emulator")],
        logger=[TensorBoardLogger("logs"), CSVLogger("logs")],
        callbacks=[ModelCheckpoint(monitor="val/mse", every_n_train_steps=None, save_last=False)],
    )
    data = weather(args.days)
    split = int(0.9 * len(data))
    train, val = torch.utils.data.Subset(data, range(split)), torch.utils.data.Subset(data, range(split, len(data)))
    trainer.fit(Emulator(args.width), DataLoader(train, 32, shuffle=True), DataLoader(val, 32))
