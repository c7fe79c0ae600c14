"""Autoencoder with background uploads of epoch snapshots to the archive directory."""

import argparse
import hashlib
import queue
import shutil
import threading
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP


class Archive:
    """Content-addressed store: <root>/<first two digits>/<digest>.pt. The 256 folders are made when it is set up."""

    def __init__(self, root):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        for i in range(0x100):
            (self.root / f"{i:x}").mkdir(exist_ok=True)

    def put(self, path):
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        shutil.copyfile(path, self.root / digest[:2] / f"{digest}.pt")
        return digest


class Uploader(Callback):
    def __init__(self, archive, workdir="snapshots", every=1):
        self.archive, self.workdir, self.every = archive, Path(workdir), every
        self.jobs = None

    def setup(self, trainer, pl_module, stage):
        if trainer.is_global_zero and self.jobs is None:
            self.workdir.mkdir(exist_ok=True)
            self.store = Archive(self.archive)
            self.jobs = queue.Queue()
            threading.Thread(target=self._run, name="uploader", daemon=True).start()

    def _run(self):
        while True:
            path = self.jobs.get()
            self.store.put(path)
            path.unlink()
            self.jobs.task_done()

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero and (trainer.current_epoch + 1) % self.every == 0:
            path = self.workdir / f"epoch-{trainer.current_epoch:03d}.pt"
            torch.save(pl_module.state_dict(), path)
            self.jobs.put(path)

    def on_fit_end(self, trainer, pl_module):
        if self.jobs is not None:
            self.jobs.join()  # <- here


class AutoEncoder(L.LightningModule):
    def __init__(self, dim=40, code=6, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(dim, 64), nn.ELU(), nn.Linear(64, code))
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.ELU(), nn.Linear(64, dim))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.RAdam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--archive", default="archive")
    ap.add_argument("--max-epochs", type=int, default=50)
    ns = ap.parse_args()
    L.seed_everything(6)
    torch.set_num_threads(1)
    basis = torch.randn(6, 40)
    data = TensorDataset(torch.randn(480, 6) @ basis + 0.1 * torch.randn(480, 40))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=ns.max_epochs, callbacks=[Uploader(ns.archive)]
    )
    trainer.fit(AutoEncoder(), DataLoader(data, batch_size=16, shuffle=True))
