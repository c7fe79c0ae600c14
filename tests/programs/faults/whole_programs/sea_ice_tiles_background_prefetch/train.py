import argparse
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.utils.data import DataLoader

from seaice.dataset import Tiles, download_season


class IceClassifier(L.LightningModule):
    def __init__(self, lr: float):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2048, 4),
        )

    def training_step(self, batch, batch_idx):
        pixels, label = batch
        loss = nn.functional.cross_entropy(self.net(pixels), label)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class Season(L.LightningDataModule):
    def __init__(self, root: str, batch_size: int):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        download_season(self.root)

    def train_dataloader(self):
        return DataLoader(Tiles(self.root), batch_size=self.batch_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="season")
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()
    L.seed_everything(8)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=5, log_every_n_steps=5)
    trainer.fit(IceClassifier(args.lr), datamodule=Season(args.root, args.batch_size))
