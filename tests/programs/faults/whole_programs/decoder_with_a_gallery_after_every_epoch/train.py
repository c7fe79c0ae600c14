"""Image autoencoder; the main process draws a small gallery after every epoch, with an external program."""

import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP

CONVERT = """
import sys, time
raw = open(sys.argv[1], 'rb').read()
time.sleep(1.5)
open(sys.argv[2], 'wb').write(b'P5 16 %d 255\\n' % (len(raw) // 16) + raw)
"""


class Gallery(L.Callback):
    def __init__(self, images, folder: str = "gallery"):
        self.images, self.folder = images, Path(folder)

    @rank_zero_only
    def on_train_epoch_end(self, trainer, module):
        self.folder.mkdir(exist_ok=True)
        start = time.monotonic()
        with torch.no_grad():
            rows = torch.cat([module(self.images).clamp(0, 1), self.images])
        raw = self.folder / f"epoch{trainer.current_epoch}.raw"
        raw.write_bytes(bytes((rows * 255).byte().flatten().tolist()))
        for scale in ("small", "large"):
            target = raw.with_name(f"{raw.stem}-{scale}.pgm")
            subprocess.run([sys.executable, "-c", CONVERT, str(raw), str(target)], check=True)
        print(f"gallery of epoch {trainer.current_epoch} in {time.monotonic() - start:.1f} s")


class AutoEncoder(L.LightningModule):
    def __init__(self, code: int = 24, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, code))
        self.decoder = nn.Sequential(nn.Linear(code, 128), nn.ReLU(), nn.Linear(128, 256), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x)).view(-1, 1, 16, 16)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self(x), x)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val/loss", nn.functional.mse_loss(self(x), x), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(31)
    images = torch.rand(1280, 1, 16, 16).round()
    train = DataLoader(TensorDataset(images[:1152]), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(images[1152:]), batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=5,
        log_every_n_steps=5,
        callbacks=[Gallery(images[:8]), ModelCheckpoint(monitor="val/loss", save_top_k=2)],
    )
    trainer.fit(AutoEncoder(), train, val)
