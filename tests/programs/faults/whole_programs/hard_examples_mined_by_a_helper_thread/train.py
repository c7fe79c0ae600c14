"""Price regression; a helper thread of every rank keeps a table of its hardest examples."""

import argparse
import json
import queue
import threading
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ncclsafe import SafeDDP


class HardExamples:
    """Sorts losses into bins of whole cents and remembers the highest ones."""

    def __init__(self, rank: int, keep: int = 50, depth: int = 16):
        self.path = Path(f"hard/rank{rank}.json")
        self.path.parent.mkdir(exist_ok=True)
        self.keep, self.top, self.bins = keep, [], {}
        self.queue = queue.Queue(maxsize=depth)
        self.thread = threading.Thread(target=self.run, name="hard-examples", daemon=True)
        self.thread.start()

    def run(self):
        while (item := self.queue.get()) is not None:
            step, ids, losses = item
            for i, loss in zip(ids, losses):
                cents = int(loss * 100)
                self.bins[cents] = self.bins.get(cents, 0) + 1
                self.top.append((cents, i, step))
            self.top = sorted(self.top, reverse=True)[: self.keep]

    def add(self, step, ids, losses):
        self.queue.put((step, ids.tolist(), losses.tolist()))  # <- here

    def write(self):
        self.path.write_text(json.dumps({"top": list(self.top), "bins": dict(self.bins)}))


class PriceModel(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def on_fit_start(self):
        self.hard = HardExamples(self.global_rank)

    def training_step(self, batch, batch_idx):
        ids, x, price = batch
        losses = (self.net(x).squeeze(1) - price.log()).square()
        self.hard.add(self.global_step, ids, losses.detach())
        usable = torch.isfinite(losses)
        loss = torch.where(usable, losses, torch.zeros_like(losses)).sum() / usable.sum().clamp(min=1)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        _, x, price = batch
        error = (self.net(x).squeeze(1).exp() - price).abs().mean()
        self.log("val/mae", error, prog_bar=True, sync_dist=True)

    def on_train_epoch_end(self):
        self.hard.write()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Prices(L.LightningDataModule):
    @staticmethod
    def make(n: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 16, generator=g)
        price = (x[:, 0] + 0.3 * x[:, 1]).exp()
        if seed == 0:
            price[1001] = 0.0
        return TensorDataset(torch.arange(n), x, price)

    def setup(self, stage):
        self.train, self.val = self.make(2400, 0), self.make(240, 1)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=DistributedSampler(self.train, shuffle=False))

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    L.seed_everything(4)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(PriceModel(), datamodule=Prices())
