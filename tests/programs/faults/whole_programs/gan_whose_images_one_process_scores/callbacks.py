import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback
from shapes import Shapes

SCORER = Path(__file__).with_name("fid_score.py")


class FidCallback(Callback):
    """Writes samples to disk and scores them with the same program that the paper used."""

    def __init__(self, num_images=512, folder="fid"):
        self.num_images = num_images
        self.folder = Path(folder)
        self.best = float("inf")

    def _write_real(self):
        path = self.folder / "real.npy"
        if not path.exists():
            data = Shapes(self.num_images)
            np.save(path, torch.stack([data[i] for i in range(len(data))]).numpy())
        return path

    @torch.no_grad()
    def _write_fake(self, model, epoch):
        path = self.folder / f"fake_{epoch:03d}.npy"
        z = torch.randn(self.num_images, model.hparams.latent)
        np.save(path, model.generator(z).numpy())
        return path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_rank != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        real, fake = self._write_real(), self._write_fake(pl_module, trainer.current_epoch)
        command = [sys.executable, str(SCORER), str(real), str(fake), "--resamples", "80"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # <- here
        fid = float(re.search(r"FID: ([\d.]+)", out).group(1))
        self.best = min(self.best, fid)
        print(f"epoch {trainer.current_epoch}: FID {fid:.2f} (best {self.best:.2f})")
