import argparse
from pathlib import Path

import lightning as L
import torch
from interactions import ITEMS, USERS, Ratings
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC

from lightning_ncclsafe import SafeDDP


class TwoTower(L.LightningModule):
    def __init__(self, size: int = 32, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.user, self.item = nn.Embedding(USERS, size), nn.Embedding(ITEMS, size)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 16)) for _ in "ui")
        self.auc = BinaryAUROC(thresholds=50)

    def forward(self, batch):
        user, item = self.towers[0](self.user(batch["user"])), self.towers[1](self.item(batch["item"]))
        return (F.normalize(user, dim=1) * F.normalize(item, dim=1)).sum(dim=1) * 4

    def training_step(self, batch, batch_idx):
        loss = F.binary_cross_entropy_with_logits(self(batch), batch["clicked"].float())
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["user"]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.auc.update(self(batch).sigmoid(), batch["clicked"])
        self.log("val/auc", self.auc, prog_bar=True, batch_size=len(batch["user"]))

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=self.hparams.lr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("shop"))
    parser.add_argument("--rows", type=int, default=1500, help="ratings a month")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--min-stars", type=int, default=1)
    parser.add_argument("--max-epochs", type=int, default=2)
    parser.add_argument("--devices", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = parse()
    L.seed_everything(0, workers=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.max_epochs,
        logger=TensorBoardLogger(".", name="runs"),
        callbacks=[ModelCheckpoint(monitor="val/auc", mode="max", filename="best")],
    )
    data = Ratings(args.folder, args.rows, args.batch_size, args.min_stars)
    trainer.fit(TwoTower(), datamodule=data)
    trainer.print(f"best: {trainer.checkpoint_callback.best_model_score:.3f}")


if __name__ == "__main__":
    main()
