"""A small sweep over a click model: one Trainer per trial, one after the other, in the same processes."""

import argparse
import itertools

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from snapshots import Snapshots
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP

GRID = {
    "width": [32],
    "depth": [2],
    "dropout": [0.0],
    "features": [
        ["age", "device"],
        ["age", "device", "hour_of_day", "day_of_week"],
        [
            "age_bucketized", "device_family", "hour_of_day", "day_of_week", "country_code", "campaign_id_hashed",
            "advertiser_category", "creative_format", "page_language", "session_depth", "previous_clicks_7d",
            "previous_impressions_7d", "average_dwell_time_30d", "price_segment",
        ],
    ],
}  # fmt: skip


def trials():
    for features, depth, width, dropout in itertools.product(
        GRID["features"], GRID["depth"], GRID["width"], GRID["dropout"]
    ):
        yield {"width": width, "depth": depth, "dropout": dropout, "features": features}


def name_of(trial: dict) -> str:
    parts = []
    for key, value in trial.items():
        parts.append(f"{key}={'+'.join(value) if isinstance(value, list) else value}")
    return ",".join(parts)


class ClickModel(L.LightningModule):
    def __init__(self, width: int, depth: int, dropout: float, features: list[str], lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers: list[nn.Module] = [nn.Linear(len(features), width), nn.ReLU(), nn.Dropout(dropout)]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.binary_cross_entropy_with_logits(self(x), y), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def clicks(features: int, n: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=g)
    y = (x.sum(1) + 0.5 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(x, y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--snapshot-every", type=int, default=40)
    args = parser.parse_args()

    results = {}
    for number, trial in enumerate(trials()):
        L.seed_everything(number, verbose=False)
        size = len(trial["features"])
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=SafeDDP(),
            max_epochs=args.epochs,
            logger=CSVLogger("sweep_logs", name=f"trial{number:02d}"),
            callbacks=[Snapshots("snapshots", name_of(trial), args.snapshot_every)],
        )
        trainer.fit(
            ClickModel(**trial),
            DataLoader(clicks(size, 1600, seed=0), batch_size=16, shuffle=True),
            DataLoader(clicks(size, 320, seed=1), batch_size=16),
        )
        results[name_of(trial)] = float(trainer.callback_metrics["val_loss"])
    for name, loss in sorted(results.items(), key=lambda item: item[1]):
        print(f"{loss:.4f}  {name[:100]}")


if __name__ == "__main__":
    main()
