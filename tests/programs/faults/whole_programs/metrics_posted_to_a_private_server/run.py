import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import BinaryAUROC


class Clicks(L.LightningDataModule):
    def __init__(self, rows: int = 12000, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        gen = torch.Generator().manual_seed(5)
        x = torch.randn(self.hparams.rows, 24, generator=gen)
        y = ((x[:, 0] * x[:, 1] + x[:, 2]) > 0).float()
        self.train, self.val = random_split(TensorDataset(x, y), [0.9, 0.1], generator=gen)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, 4 * self.hparams.batch_size)


class ClickModel(L.LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(24, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )
        self.auc = BinaryAUROC(thresholds=50)

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = binary_cross_entropy_with_logits(self(x), y)
        self.log("train/bce", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.auc.update(logits, y.int())
        self.log("val/bce", binary_cross_entropy_with_logits(logits, y), sync_dist=True)
        self.log("val/auc", self.auc, prog_bar=True)


if __name__ == "__main__":
    LightningCLI(ClickModel, Clicks, save_config_callback=None)
