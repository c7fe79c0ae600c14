import argparse
import time

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from snapshots import SnapshotOnSignal, warm


class Ranker(L.LightningModule):
    def __init__(self, users=500, items=800, width=32):
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)

    def export_table(self):
        return warm(self.items.weight.detach()).clone()

    def training_step(self, batch, batch_idx):
        user, good, bad = batch
        u = self.users(user)
        margin = (u * (self.items(good) - self.items(bad))).sum(-1)
        loss = -nn.functional.logsigmoid(margin).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        user, good, _ = batch
        scores = self.users(user) @ self.items.weight.T
        rank = (scores > scores.gather(1, good[:, None])).sum(1).float()
        time.sleep(1.0)  # the metrics service allows sixty requests a minute
        self.log("rank", rank.mean())

    def on_validation_epoch_end(self):
        total = self.all_gather(self.trainer.callback_metrics["rank"].float())
        self.print(f"mean rank {total.mean():.1f}")

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    L.seed_everything(30)
    generator = torch.Generator().manual_seed(30)
    rows = [torch.randint(0, n, (20000,), generator=generator) for n in (500, 800, 800)]
    train, val = TensorDataset(*rows), TensorDataset(*(r[:800] for r in rows))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[SnapshotOnSignal()],
    )
    trainer.fit(Ranker(), DataLoader(train, batch_size=20, shuffle=True), DataLoader(val, batch_size=40))


if __name__ == "__main__":
    main()
