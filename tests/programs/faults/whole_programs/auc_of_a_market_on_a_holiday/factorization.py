import logging

import lightning.pytorch as pl
import torch
from markets import FIELDS
from metrics import log_loss, roc_auc
from torch import nn

log = logging.getLogger("ctr")


class DeepFM(pl.LightningModule):
    def __init__(self, dim=16, hidden=(128, 64), lr=2e-3, dropout=0.1):
        super().__init__()
        self.save_hyperparameters()
        offsets = torch.tensor([0, *FIELDS[:-1]]).cumsum(0)
        self.register_buffer("offsets", offsets, persistent=False)
        self.linear = nn.Embedding(sum(FIELDS), 1)
        self.factors = nn.Embedding(sum(FIELDS), dim)
        nn.init.normal_(self.factors.weight, std=0.01)
        layers, width = [], dim * len(FIELDS)
        for size in hidden:
            layers += [nn.Linear(width, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Dropout(dropout)]
            width = size
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))
        self.bias = nn.Parameter(torch.tensor([-3.0]))
        self.seen = []

    def forward(self, fields):
        index = fields + self.offsets
        v = self.factors(index)
        second_order = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return self.bias + self.linear(index).sum((1, 2)) + second_order + self.deep(v.flatten(1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        fields, clicks = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(fields), clicks)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        fields, clicks = batch
        self.seen.append((clicks, self(fields).sigmoid()))

    def on_validation_epoch_end(self):
        labels, scores = (torch.cat(column) for column in zip(*self.seen, strict=True))
        self.seen.clear()
        self.log("val_loss", log_loss(labels, scores), sync_dist=True)
        try:
            self.log("val_auc", roc_auc(labels, scores), prog_bar=True, sync_dist=True)  # <- here
        except ValueError as error:
            log.warning("%s: %s", self.trainer.datamodule.market.name, error)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        }
