"""Next-click model on streamed sessions; popularity features come from a store that all ranks update in turn."""

import argparse
from collections import Counter

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP
from store import FeatureStore

ITEMS = 400
MARKETS = ["de", "fr", "nl"]


class SessionLog(IterableDataset):
    """Sessions of one market, as they come: user, clicked items, next click."""

    def __init__(self, market, batches, batch_size):
        self.market, self.batches, self.batch_size = market, batches, batch_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(MARKETS.index(self.market))
        taste = torch.rand(ITEMS, generator=generator) ** 4
        for number in range(self.batches):
            if self.market == "nl" and number == 120:
                taste = taste.roll(7)
            clicks = torch.multinomial(taste.expand(self.batch_size, ITEMS), 9, generator=generator)
            yield clicks[:, :8], clicks[:, 8]


class NextClick(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.save_hyperparameters(vars(args))
        self.args = args
        self.items = nn.Embedding(ITEMS, 32)
        self.body = nn.GRU(33, 48, batch_first=True)
        self.out = nn.Linear(48, ITEMS)
        self.clicks = Counter()
        self.reference = None
        self.recent = torch.zeros(ITEMS)

    def setup(self, stage):
        self.store = FeatureStore(self.args.store, ITEMS)
        self.popularity = torch.tensor(self.store.popularity()).log()

    def train_dataloader(self):
        market = MARKETS[self.global_rank]
        return DataLoader(SessionLog(market, self.args.batches, self.args.batch_size), batch_size=None)

    def training_step(self, batch, batch_idx):
        history, target = batch
        features = torch.cat([self.items(history), self.popularity[history].unsqueeze(-1)], dim=-1)
        states, _ = self.body(features)
        loss = nn.functional.cross_entropy(self.out(states[:, -1]), target)
        self.clicks.update(target.tolist())
        self.recent = 0.95 * self.recent + torch.bincount(target, minlength=ITEMS)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def drift(self):
        share = self.recent / self.recent.sum()
        if self.reference is None:
            self.reference = share
        return 0.5 * (share - self.reference).abs().sum().item()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        step = batch_idx + 1
        if (step + 8 * self.global_rank) % self.args.flush_every == 0:
            self.store.add_clicks(self.clicks)
            self.clicks.clear()
            self.popularity = torch.tensor(self.store.popularity()).log()
        if step > 100 and step % self.args.drift_every == 0:
            value = self.drift()
            self.log("train/drift", value)
            if value > self.args.drift_limit:
                self.store.note_drift(self.global_rank, MARKETS[self.global_rank], value)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="features.db")
    parser.add_argument("--batches", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--flush-every", type=int, default=25)
    parser.add_argument("--drift-every", type=int, default=10)
    parser.add_argument("--drift-limit", type=float, default=0.4)
    args = parser.parse_args()

    L.seed_everything(13)
    torch.set_num_threads(1)
    FeatureStore(args.store, ITEMS).create()
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=1, log_every_n_steps=25)
    trainer.fit(NextClick(args))


if __name__ == "__main__":
    main()
