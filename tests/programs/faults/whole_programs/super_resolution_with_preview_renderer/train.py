"""Super-resolution; rank 0 renders previews with an external program and in a thread."""

import queue
import subprocess
import sys
import threading
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

RENDER = """
import sys, time, numpy as np
array = np.load(sys.argv[1])
for row in range(len(array)):
    time.sleep(0.25)
np.save(sys.argv[2], np.uint8(np.clip(array, 0, 1) * 255))
"""


class Pairs(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(i)
        low = torch.rand(1, 8, 8, generator=gen)
        high = F.interpolate(low.unsqueeze(0), size=32, mode="bicubic", align_corners=False)[0].clamp(0, 1)
        return F.avg_pool2d(high, 2), high


class Previews(L.Callback):
    """A still is rendered at once, the contact sheet in a background thread."""

    def __init__(self, folder="previews"):
        self.folder = Path(folder)
        self.jobs = queue.Queue()

    def on_fit_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            self.thread = threading.Thread(target=self.work)
            self.thread.start()

    def work(self):
        while (job := self.jobs.get()) is not None:
            self.render(*job)

    def render(self, name, images):
        source, target = self.folder / f"{name}.raw.npy", self.folder / f"{name}.npy"
        np.save(source, images)
        subprocess.run([sys.executable, "-c", RENDER, str(source), str(target)], check=True)

    @torch.no_grad()
    def on_train_epoch_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        low = torch.stack([Pairs(64)[i][0] for i in range(28)])
        images = pl_module.net(low).squeeze(1).numpy()
        self.render(f"still{trainer.current_epoch}", images)
        self.jobs.put((f"sheet{trainer.current_epoch}", images))

    def teardown(self, trainer, pl_module, stage):
        if trainer.is_global_zero:
            self.jobs.put(None)
            self.thread.join()


class SuperResolution(L.LightningModule):
    def __init__(self, width=16, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, 4, 3, 1, 1), nn.PixelShuffle(2)
        )

    def training_step(self, batch, batch_idx):
        low, high = batch
        loss = F.l1_loss(self.net(low), high)
        self.log("l1", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(14)
    trainer = L.Trainer(accelerator="cpu", devices=2, max_epochs=3, strategy=SafeDDP(), callbacks=[Previews()])
    trainer.fit(SuperResolution(), DataLoader(Pairs(800), batch_size=8, shuffle=True))
