"""ResNet-ish toy on a queue with a short wall time: save shortly before the limit, the job script requeues us."""

import argparse
import os
import signal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Tiles(Dataset):
    def __init__(self, n=6000):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        y = i % 5
        return torch.randn(3, 16, 16, generator=g) + 0.3 * y, y


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.norm = nn.GroupNorm(4, c)

    def forward(self, x):
        return F.relu(x + self.b(F.relu(self.norm(self.a(x)))))


class TileNet(L.LightningModule):
    def __init__(self, width=8, blocks=2, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class WallTime(Callback):
    """Asks for a last checkpoint `margin` seconds before the scheduler would end the job."""

    def __init__(self, limit, margin):
        self.seconds = max(1.0, limit - margin)
        self.due = False

    def _on_alarm(self, signum, frame):
        self.due = True

    def on_fit_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)  # <- here

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 20 == 0:
            due = trainer.strategy.broadcast(self.due)
            if due:
                trainer.save_checkpoint(os.path.join("requeue", "last.ckpt"))
                trainer.should_stop = True

    def teardown(self, trainer, pl_module, stage):
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--walltime", type=float, default=20)
    p.add_argument("--margin", type=float, default=8)
    args = p.parse_args()
    L.seed_everything(0)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=100,
        callbacks=[WallTime(args.walltime, args.margin), ModelCheckpoint(every_n_train_steps=200)],
    )
    resume = "requeue/last.ckpt" if os.path.exists("requeue/last.ckpt") else None
    trainer.fit(TileNet(), DataLoader(Tiles(), batch_size=16, shuffle=True), ckpt_path=resume)


if __name__ == "__main__":
    main()
