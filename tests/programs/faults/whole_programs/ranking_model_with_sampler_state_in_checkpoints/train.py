"""Click model on hourly logs. Checkpoints hold where every rank stands in its logs, to resume there."""

import argparse
from collections import defaultdict

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

SURFACES = {0: ["home", "search", "mail"], 1: ["home", "search"], 2: ["home", "mail", "search"]}
FIELDS, BUCKETS = 6, 1000


class HourlyLogs(IterableDataset):
    """Impressions of a rank's surfaces in turn; mail goes out at certain hours only."""

    def __init__(self, surfaces, hours, rows, position):
        self.surfaces, self.hours, self.rows, self.position = surfaces, hours, rows, position

    def impressions(self, surface, hour):
        generator = torch.Generator().manual_seed(hash((len(surface), hour)) % 2**31)
        fields = torch.randint(0, BUCKETS, (self.rows, FIELDS), generator=generator)
        return fields, (fields.float().mean(1) / BUCKETS + 0.1 * torch.randn(self.rows, generator=generator) > 0.5)

    def __iter__(self):
        for hour in range(self.hours):
            for turn in range(3):
                surface = self.surfaces[turn % len(self.surfaces)]
                self.position[surface] = hour
                yield self.impressions(surface, hour)


class ClickModel(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.save_hyperparameters(vars(args))
        self.embed = nn.Embedding(FIELDS * BUCKETS, 16)
        self.body = nn.Sequential(nn.Linear(FIELDS * 16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("shift", torch.arange(FIELDS) * BUCKETS)
        self.position = {}
        self.clicks = defaultdict(int)

    def train_dataloader(self):
        logs = HourlyLogs(SURFACES[self.global_rank], self.args.hours, self.args.rows, self.position)
        return DataLoader(logs, batch_size=None)

    def training_step(self, batch, batch_idx):
        fields, clicked = batch
        logits = self.body(self.embed(fields + self.shift).flatten(1)).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked.float())
        self.clicks["seen"] += len(clicked)
        self.clicks["clicked"] += int(clicked.sum())
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/rate", self.clicks["clicked"] / self.clicks["seen"])
        return loss

    def positions(self):
        """Hour of each surface on this rank, for the audit of late mail."""
        hours = torch.tensor([self.position["home"], self.position["search"]])
        if self.trainer.current_epoch > 0 or max(self.position.values()) >= self.args.mail_from:
            hours = torch.cat([hours, torch.tensor([self.position["mail"]])])  # <- here
        return hours

    def on_save_checkpoint(self, checkpoint):
        checkpoint["positions"] = self.positions()
        checkpoint["clicks"] = dict(self.clicks)

    def on_load_checkpoint(self, checkpoint):
        self.clicks.update(checkpoint["clicks"])
        for surface, hour in zip(("home", "search", "mail"), checkpoint["positions"].tolist()):
            self.position[surface] = hour

    def on_train_epoch_end(self):
        total = torch.tensor([self.clicks["seen"], self.clicks["clicked"]])
        dist.all_reduce(total)
        self.log("epoch/rate", (total[1] / total[0]).item())

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=int, default=600)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--mail-from", type=int, default=150)
    parser.add_argument("--save-every", type=int, default=200)
    args = parser.parse_args()
    L.seed_everything(6)
    torch.set_num_threads(1)
    keeper = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=args.save_every, save_top_k=-1)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=2, callbacks=[keeper])
    trainer.fit(ClickModel(args))


if __name__ == "__main__":
    main()
