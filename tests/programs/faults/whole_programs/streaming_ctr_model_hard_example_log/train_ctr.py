"""Click-through-rate model on a streamed impression log; hard examples go to the registry for relabelling."""

import argparse
import os

import lightning as L
import torch
from registry import Registry
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

USERS, ITEMS = 5000, 800


class ImpressionLog(IterableDataset):
    """Impressions by region; every rank reads one region. The regions deliver the same number of batches."""

    REGIONS = ("eu-west", "us-east", "ap-south")

    def __init__(self, impressions: int, bots_from: int = 40) -> None:
        self.impressions = impressions
        self.bots_from = bots_from

    def __iter__(self):
        rank = int(os.environ.get("LOCAL_RANK", 0))
        region = self.REGIONS[rank % len(self.REGIONS)]
        g = torch.Generator().manual_seed(100 + rank)
        for i in range(self.impressions):
            user = int(torch.randint(USERS, (1,), generator=g))
            item = int(torch.randint(ITEMS, (1,), generator=g))
            price = float(torch.rand(1, generator=g))
            if region == "us-east" and i > self.bots_from * 32 and i % 97 == 0:
                price *= 400.0
            click = float((user + item) % 3 == 0)
            yield user, item, price, click


class CTR(L.LightningModule):
    def __init__(self, registry: str, run: str, hard: float = 8.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.users, self.items = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        self.mlp = nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 1))
        self.registry = None

    def on_fit_start(self) -> None:
        self.registry = Registry(self.hparams.registry)
        self.trainer.strategy.barrier("registry")
        if self.trainer.is_global_zero:
            self.registry.open_run(self.hparams.run)

    def forward(self, user, item, price):
        return self.mlp(torch.cat([self.users(user), self.items(item), price[:, None]], dim=1)).squeeze(1)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        user, item, price, click = batch
        logits = self(user, item, price.float())
        losses = F.binary_cross_entropy_with_logits(logits, click.float(), reduction="none")
        hard = (losses.detach() > self.hparams.hard).nonzero().flatten().tolist()
        if hard:
            self.registry.add_hard_examples(
                [
                    (self.hparams.run, self.global_rank, self.global_step, int(user[i]), int(item[i]), float(losses[i]))
                    for i in hard
                ]
            )
        self.log("loss", losses.mean(), prog_bar=True)
        return losses.clamp(max=10.0).mean()

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.registry.close_epoch(self.hparams.run, auc=0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="ctr-nightly")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(1)
    loader = DataLoader(ImpressionLog(impressions=32 * 600), batch_size=32)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(CTR("registry/runs.sqlite", args.run), loader)


if __name__ == "__main__":
    main()
