from pathlib import Path

import lightning as L
import torch
from torch import nn

from .store import DiskBank


class BankContrast(L.LightningModule):
    """Positive: a noisy copy. Negatives: the bank. Batches of blurred views are not stored."""

    def __init__(self, width: int = 32, folder: str = "bank_files", store_above: float = 0.45, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, width))
        self.bank = None

    def on_fit_start(self):
        self.bank = DiskBank(Path(self.hparams.folder) / f"shard{self.global_rank}")
        self.bank.add(torch.randn(16, self.hparams.width))

    def embed(self, x):
        return nn.functional.normalize(self.net(x), dim=-1)

    def training_step(self, batch, batch_idx):
        views, sharp = batch
        anchor, positive = self.embed(views), self.embed(views + 0.1 * torch.randn_like(views))
        negatives = self.bank.sample(64)
        near = (anchor * positive).sum(1, keepdim=True)
        logits = torch.cat((near, anchor @ negatives.T), 1) / 0.2
        loss = nn.functional.cross_entropy(logits, torch.zeros(len(views), dtype=torch.long))
        if sharp.mean() > self.hparams.store_above:
            self.bank.add(anchor.detach())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
