"""Two-tower retrieval model. We only need a rough model for mining, so stop as soon as the loss is good enough."""

import argparse
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP


class ClickLog(IterableDataset):
    """Streams one file of (query, item) features per rank; files are written per market by the ETL job."""

    def __init__(self, root, rank, world):
        files = sorted(Path(root).glob("clicks-*.pt"))
        self.files = files[rank::world]

    def __iter__(self):
        for f in self.files:
            queries, items = torch.load(f)
            for q, i in zip(queries, items):
                yield q, i


def export_clicks(root, rows=4096, dim=32):
    Path(root).mkdir(parents=True, exist_ok=True)
    for k, (market, noise) in enumerate({"at": 1.4, "ch": 1.2, "de": 0.35}.items()):
        g = torch.Generator().manual_seed(k)
        q = torch.randn(rows, dim, generator=g)
        i = q + noise * torch.randn(rows, dim, generator=g)
        torch.save((q, i), Path(root) / f"clicks-{k:03d}-{market}.pt")


class Clicks(L.LightningDataModule):
    def __init__(self, root="clicks", batch_size=32):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def prepare_data(self):
        if not Path(self.root).exists():
            export_clicks(self.root)

    def train_dataloader(self):
        data = ClickLog(self.root, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(data, batch_size=self.batch_size, drop_last=True)


class TwoTower(L.LightningModule):
    def __init__(self, dim=32, width=64, temperature=0.1, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.query = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, 32))
        self.item = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, 32))

    def forward(self, q, i):
        return F.normalize(self.query(q), dim=-1) @ F.normalize(self.item(i), dim=-1).T / self.hparams.temperature

    def training_step(self, batch, batch_idx):
        logits = self(*batch)
        loss = F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 5)]


class GoodEnough(Callback):
    def __init__(self, target, decay=0.95, min_batches=30):
        self.target, self.decay, self.min_batches = target, decay, min_batches
        self.ema = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"].item()
        self.ema = loss if self.ema is None else self.decay * self.ema + (1 - self.decay) * loss
        if trainer.global_step >= self.min_batches and self.ema < self.target:
            trainer.should_stop = True  # <- here


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--target", type=float, default=1.0)
    p.add_argument("--epochs", type=int, default=20)
    args = p.parse_args()
    L.seed_everything(11)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[GoodEnough(args.target), LearningRateMonitor()],
    )
    trainer.fit(TwoTower(), datamodule=Clicks())
    trainer.print("mining model ready")


if __name__ == "__main__":
    main()
