import argparse
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from grid.data import Grid
from lightning_ncclsafe import SafeDDP


class Forecast(L.LightningModule):
    def __init__(self, cells=16, width=48, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(cells, width), nn.GELU(), nn.Linear(width, cells))

    def training_step(self, batch, batch_idx):
        today, tomorrow = batch
        loss = F.mse_loss(today + self.net(today), tomorrow)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        today, tomorrow = batch
        self.log("val_error", F.l1_loss(today + self.net(today), tomorrow), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default=Path(__file__).parent / "regions", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(9)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        use_distributed_sampler=False,
    )
    trainer.fit(Forecast(), datamodule=Grid(args.root))
