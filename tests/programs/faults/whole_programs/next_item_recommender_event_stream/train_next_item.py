"""Next-item prediction from event logs. prepare_data fetches the day's partitions, one per rank."""

import argparse
import json
import random
from pathlib import Path

import lightning as L
import torch
from event_stream import HISTORY, EventStream
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP

ITEMS = 500


def export_partition(file: Path, partition: int, events: int) -> None:
    """Stands in for the warehouse's export. A deleted item leaves a null behind."""
    rng = random.Random(partition)
    with file.open("w") as out:
        for n in range(events):
            item: int | None = rng.randrange(1, ITEMS)
            if partition == 2 and n == 5417:
                item = None
            out.write(json.dumps({"user": f"u{rng.randrange(300)}", "item": item, "ts": 1700000000 + n}) + "\n")


class NextItem(L.LightningModule):
    def __init__(self, width: int = 48, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.items = nn.Embedding(ITEMS, width, padding_idx=0)
        self.mix = nn.Sequential(nn.Linear(HISTORY * width, 96), nn.ReLU(), nn.Linear(96, width))

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        return self.mix(self.items(history).flatten(1)) @ self.items.weight.T

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        history, item = batch
        logits = self(history)
        loss = F.cross_entropy(logits, item)
        if batch_idx % 20 == 0:
            hits = (logits.topk(10).indices == item[:, None]).any(1).float().mean()
            self.log("hit_rate_at_10", hits, sync_dist=True)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Events(L.LightningDataModule):
    def __init__(self, folder: str, partitions: int, batch_size: int, batches: int) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.partitions, self.batch_size, self.batches = partitions, batch_size, batches

    def prepare_data(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for partition in range(self.partitions):
            export_partition(self.folder / f"part-{partition:03d}.jsonl", partition, events=12_000)

    def train_dataloader(self) -> DataLoader:
        stream = EventStream(self.folder, self.trainer.global_rank, self.batch_size, self.batches)
        return DataLoader(stream, batch_size=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    L.seed_everything(8)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(NextItem(), datamodule=Events("events/2026-02-11", 3, batch_size=32, batches=args.batches))


if __name__ == "__main__":
    main()
