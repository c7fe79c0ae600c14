from __future__ import annotations

from itertools import pairwise

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

from ctr.logs import CONTEXT, ITEMS, USERS


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ClickModel(L.LightningModule):
    """Two towers. Items without a history have no useful embedding, but attributes."""

    def __init__(self, width: int = 32, new_below_days: float = 7.0, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.users = nn.Embedding(USERS, width)
        self.items = nn.Embedding(ITEMS, width)
        self.user_tower = mlp(width + CONTEXT, 128, width)
        self.item_tower = mlp(width, 128, width)
        self.new_item_tower = mlp(12, 64, 64, width)
        self.bias = nn.Parameter(torch.zeros(()))
        self.auc = BinaryAUROC(thresholds=200)

    def encode_items(self, items: Tensor, attributes: Tensor, age: Tensor) -> Tensor:
        encoded = self.item_tower(self.items(items))
        is_new = age < self.hparams.new_below_days
        if is_new.any():  # <- here
            encoded = encoded.masked_scatter(is_new[:, None], self.new_item_tower(attributes[is_new]))
        return encoded

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        user = self.user_tower(torch.cat([self.users(batch["users"]), batch["context"]], dim=1))
        item = self.encode_items(batch["items"], batch["attributes"], batch["age"])
        return (user * item).sum(1) / self.hparams.width**0.5 + self.bias

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch["clicks"])
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch)
        self.auc.update(logits, batch["clicks"].int())
        self.log("val/auc", self.auc, prog_bar=True)
        self.log("val/calibration", logits.sigmoid().mean() / batch["clicks"].mean().clamp(min=1e-3), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
