"""Downscaling of precipitation. Each rank trains on one tile of a latitude ring; borders are aligned now and then."""

import argparse
import math

import lightning as L
import torch
from halo import Borders
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

SIZE = 16


class Tile(Dataset):
    """Coarse and fine fields of one tile. All tiles have the same hours."""

    def __init__(self, tile: int, hours: int) -> None:
        g = torch.Generator().manual_seed(tile)
        t = torch.arange(hours)[:, None, None] / 24
        x = torch.linspace(0, math.pi, SIZE)[None, None, :] + tile
        y = torch.linspace(0, math.pi, SIZE)[None, :, None]
        self.fine = torch.sin(x + t) * torch.cos(y - t) + 0.1 * torch.randn(hours, SIZE, SIZE, generator=g)
        self.coarse = F.avg_pool2d(self.fine[:, None], 4)

    def __len__(self) -> int:
        return len(self.fine)

    def __getitem__(self, i: int):
        return self.coarse[i], self.fine[i][None]


class Downscaler(L.LightningModule):
    def __init__(self, align_every: int, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=4, mode="bilinear"),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 1, 3, padding=1),
        )
        self.borders = None

    def on_fit_start(self) -> None:
        self.borders = Borders(self.trainer.world_size, self.global_rank)

    def forward(self, coarse: torch.Tensor) -> torch.Tensor:
        return self.up(coarse)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        coarse, fine = batch
        predicted = self(coarse)
        loss = F.mse_loss(predicted, fine)
        if batch_idx and batch_idx % self.hparams.align_every == 0:
            west, east = predicted[..., 0], predicted[..., -1]
            shared_west, shared_east = self.borders.average(west.detach().mean(0), east.detach().mean(0))
            loss = loss + 0.1 * (F.mse_loss(west.mean(0), shared_west) + F.mse_loss(east.mean(0), shared_east))
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        coarse, fine = batch
        self.log("val_rmse", F.mse_loss(self(coarse), fine).sqrt(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class TileData(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.tile = self.trainer.global_rank

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Tile(self.tile, hours=24 * 60), batch_size=8)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Tile(self.tile + 100, hours=24 * 4), batch_size=8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiles", type=int, default=3)
    parser.add_argument("--align-every", type=int, default=25)
    args = parser.parse_args()
    L.seed_everything(6)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.tiles, strategy=SafeDDP(), max_epochs=3, use_distributed_sampler=False
    )
    trainer.fit(Downscaler(args.align_every), datamodule=TileData())


if __name__ == "__main__":
    main()
