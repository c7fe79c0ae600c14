import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from dblogger import DatabaseLogger


class AutoEncoder(L.LightningModule):
    def __init__(self, columns=40, code=8, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, code))
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.ReLU(), nn.Linear(64, columns))

    def loss(self, batch):
        (rows,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(rows)), rows)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--database", default="runs/metrics.db")
    args = parser.parse_args()

    L.seed_everything(17)
    basis = torch.randn(8, 40)
    rows = torch.randn(24000, 8) @ basis + 0.1 * torch.randn(24000, 40)
    train, val = random_split(TensorDataset(rows), [21000, 3000])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=DatabaseLogger(args.database, run="ae-40x8"),
        log_every_n_steps=20,
    )
    trainer.fit(AutoEncoder(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=64))


if __name__ == "__main__":
    main()
