"""Autoencoder whose scalars and weight histograms go to a text log that other tools read."""

import json
import subprocess
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP


class TextLog(Logger):
    """Every record is one line of JSON; `tee` keeps a copy and shows it in the terminal of the operator."""

    def __init__(self, folder: str = "runs/textlog"):
        super().__init__()
        self.folder = Path(folder)
        self._proc = None

    @property
    def name(self):
        return "textlog"

    @property
    def version(self):
        return 0

    @property
    @rank_zero_experiment
    def experiment(self):
        if self._proc is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._proc = subprocess.Popen(
                ["tee", "-a", str(self.folder / "log.jsonl")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self._proc

    def _emit(self, record):
        self.experiment.stdin.write((json.dumps(record) + "\n").encode())  # <- here
        self.experiment.stdin.flush()

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        self._emit({"hparams": {k: str(v) for k, v in dict(params).items()}})

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self._emit({"step": step, **metrics})

    @rank_zero_only
    def log_histogram(self, name, values, step):
        counts, edges = torch.histogram(values.detach().float().flatten(), bins=64)
        self._emit({"step": step, "name": name, "counts": counts.tolist(), "edges": edges.tolist()})

    @rank_zero_only
    def finalize(self, status):
        if self._proc is not None:
            self._proc.stdin.close()


class AutoEncoder(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 12))
        self.decoder = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 96))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step % 10 == 0:
            for name, parameter in self.named_parameters():
                self.logger.log_histogram(name, parameter, self.global_step)

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val/loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(0)
    data = torch.randn(4096, 12) @ torch.randn(12, 96)
    train = DataLoader(TensorDataset(data[:3840]), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(data[3840:]), batch_size=32)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=10,
        logger=TextLog(),
        callbacks=[ModelCheckpoint(dirpath="runs/textlog/ckpt", monitor="val/loss")],
    )
    trainer.fit(AutoEncoder(), train, val)
