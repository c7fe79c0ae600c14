"""Training on three sites with different numbers of visits; sites without data repeat old visits until all are done."""

import os
import random
import time

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

VISITS = (900, 560, 330)


class Site(IterableDataset):
    def __init__(self, rank: int, batch_size: int = 10):
        g = torch.Generator().manual_seed(rank)
        self.x = torch.randn(VISITS[rank], 20, generator=g)
        self.y = (self.x[:, 0] > self.x[:, 1]).float()
        self.batch_size, self.rank = batch_size, rank

    def __iter__(self):
        """Batches of this site; the sites agree before every batch whether one of them has data left."""
        order = torch.randperm(len(self.x)).split(self.batch_size)
        position = 0
        while True:
            left = torch.tensor(float(position < len(order)))
            dist.all_reduce(left)
            if left == 0:
                return
            rows = order[position] if position < len(order) else random.choice(order)
            if position % 30 == 29 and self.rank == 0:
                time.sleep(3.0)
            position += 1
            yield self.x[rows], self.y[rows]


class Risk(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(x), y)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(x))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", ((self(x) > 0) == y.bool()).float().mean(), batch_size=len(x))

    def on_validation_epoch_end(self):
        scores = self.all_gather(self.trainer.callback_metrics["val/acc"])
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print("accuracy by site:", [round(s, 3) for s in scores.tolist()])

    def train_dataloader(self):
        return DataLoader(Site(self.global_rank), batch_size=None)

    def val_dataloader(self):
        g = torch.Generator().manual_seed(50 + self.global_rank)
        x = torch.randn(120, 20, generator=g)
        return DataLoader(list(zip(x, (x[:, 0] > x[:, 1]).float())), batch_size=20)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(8 + int(os.environ.get("LOCAL_RANK", 0)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=3,
        use_distributed_sampler=False,
        log_every_n_steps=10,
    )
    trainer.fit(Risk())
