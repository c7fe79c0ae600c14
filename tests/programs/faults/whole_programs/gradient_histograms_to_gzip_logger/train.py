import argparse
import json
import subprocess
import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class CompressedJsonLogger(Logger):
    """Writes one JSON object per call into a gzip stream. Histograms are bulky, text would fill the quota."""

    def __init__(self, name="histograms", level=1):
        super().__init__()
        self._name, self.level = name, level
        self._gzip = None
        self._started = time.time()

    @property
    def name(self):
        return self._name

    @property
    def version(self):
        return "0"

    @property
    def gzip(self):
        if self._gzip is None:
            self._gzip = subprocess.Popen(
                ["gzip", f"-{self.level}", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self._gzip

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        self._write({"hparams": {k: str(v) for k, v in dict(params).items()}})

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self._write({"step": step, "t": time.time() - self._started, **metrics})

    @rank_zero_only
    def log_histogram(self, tag, values, step):
        self._write({"step": step, "tag": tag, "hist": values.tolist()})

    def _write(self, record):
        self.gzip.stdin.write(json.dumps(record).encode() + b"\n")  # <- here

    @rank_zero_only
    def finalize(self, status):
        data, _ = self.gzip.communicate()
        with open(f"{self._name}.json.gz", "wb") as f:
            f.write(data)


class Images(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        label = i % 10
        x = torch.randn(1, 12, 12, generator=g)
        x[0, label] += 1.5
        return x, label


class SmallNet(L.LightningModule):
    def __init__(self, width=16, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 100, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.global_step % 2 == 0:
            for logger in self.loggers:
                if isinstance(logger, CompressedJsonLogger):
                    for name, p in self.named_parameters():
                        logger.log_histogram(name, p.grad.flatten()[:512], self.global_step)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--gzip-level", type=int, default=1)
    ns = ap.parse_args()
    L.seed_everything(2)
    torch.set_num_threads(1)
    loggers = [CSVLogger("logs"), CompressedJsonLogger(level=ns.gzip_level)]
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=ns.epochs, logger=loggers)
    trainer.fit(SmallNet(), DataLoader(Images(), batch_size=16, shuffle=True))
