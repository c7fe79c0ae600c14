import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn

from birdcall.callbacks import RefreshFeatures
from birdcall.data import BirdData


class CallClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(129, 48, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(48, 4)
        )

    def training_step(self, batch, batch_idx):
        spec, species = batch
        loss = nn.functional.cross_entropy(self.net(spec.transpose(1, 2)), species)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-epoch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    L.seed_everything(2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[RefreshFeatures(args.per_epoch)],
    )
    trainer.fit(CallClassifier(), datamodule=BirdData())
