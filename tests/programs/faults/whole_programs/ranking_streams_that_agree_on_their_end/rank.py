import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.utils.data import DataLoader

from ranking.archive import Archive
from ranking.logs import dump
from ranking.stream import DailyClicks


class Ranker(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, clicked = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(x)[:, 0], clicked)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Clicks(L.LightningDataModule):
    def __init__(self, root, batch_size):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        dump(self.root)

    def train_dataloader(self):
        trainer = self.trainer
        stream = DailyClicks(self.root, trainer.global_rank, trainer.world_size, self.batch_size)
        return DataLoader(stream, batch_size=None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="clicks")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(12)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[Archive()],
        log_every_n_steps=10,
    )
    trainer.fit(Ranker(), Clicks(args.root, args.batch_size))
