"""Streaming training on log files of very different length. All ranks stop an epoch as soon as one has no more data."""

import argparse
import subprocess
import sys
import time

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP


class SensorStream(IterableDataset):
    """Rank r reads sensor r. Sensors deliver between 700 and 1000 windows per day, some of them after a pause."""

    def __init__(self, rank, pause=14.0):
        self.rank, self.pause, self.day = rank, pause, 0

    def __iter__(self):
        day, self.day = self.day, self.day + 1
        g = torch.Generator().manual_seed(self.rank * 31 + day)
        windows = 700 + int(torch.randint(0, 300, (), generator=g))
        for k in range(windows):
            if day == 1 and self.rank == 1 and k == 320:
                time.sleep(self.pause)
            x = torch.randn(24, generator=g)
            yield x, (x[:4].sum() > 0).float()[None]


class Together:
    """Ends iteration on all ranks with the shortest one."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        it = iter(self.loader)
        while True:
            batch = next(it, None)
            more = torch.tensor([0 if batch is None else 1])
            dist.all_reduce(more, op=dist.ReduceOp.MIN)
            if more.item() == 0:
                return
            yield batch


class Detector(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 1))

    def train_dataloader(self):
        return Together(DataLoader(SensorStream(self.trainer.global_rank), batch_size=16, drop_last=True))

    def training_step(self, batch, batch_idx):
        loss = F.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])
        self.log("train/bce", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class DailyReport(Callback):
    """A separate program writes the report; the last one is collected when training ends."""

    def __init__(self):
        self.running = []

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["train/bce"])
            code = f"import time; time.sleep(6); open('report-{trainer.current_epoch}.txt', 'w').write('{loss:.4f}')"
            self.running.append(subprocess.Popen([sys.executable, "-c", code]))

    def on_train_end(self, trainer, pl_module):
        for process in self.running:
            process.wait()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--days", type=int, default=4)
    args = p.parse_args()
    L.seed_everything(2)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.days,
        callbacks=[DailyReport()],
        log_every_n_steps=10,
    )
    trainer.fit(Detector())


if __name__ == "__main__":
    main()
