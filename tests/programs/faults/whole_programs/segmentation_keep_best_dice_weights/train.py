import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Phantoms(Dataset):
    """Synthetic 32x32 slices with an ellipse as lesion (size grows with the index, like our sorted cases)."""

    def __init__(self, n, seed=0):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 9973 + i)
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
        cy, cx = (torch.rand(2, generator=g) - 0.5).tolist()
        r = 0.12 + 0.5 * i / self.n
        mask = (((yy - cy) / r) ** 2 + ((xx - cx) / (0.7 * r)) ** 2 < 1).float()
        return (mask + 0.5 * torch.randn(32, 32, generator=g))[None], mask[None]


def dice(pred, target, eps=1e-6):
    inter = (pred * target).sum((1, 2, 3))
    return ((2 * inter + eps) / (pred.sum((1, 2, 3)) + target.sum((1, 2, 3)) + eps)).mean()


class UNetLite(L.LightningModule):
    def __init__(self, channels=8, lr=3e-3, ema_alpha=0.7):
        super().__init__()
        self.save_hyperparameters()
        self.down = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.mid = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(channels, 1, 2, stride=2)
        self.fold_dice = []
        self.ema_dice = None
        self.best_ema_dice = None

    def forward(self, x):
        return self.up(self.mid(self.down(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.binary_cross_entropy_with_logits(logits, y) + 1 - dice(logits.sigmoid(), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.fold_dice.clear()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        d = dice((self(x).sigmoid() > 0.5).float(), y)
        self.fold_dice.append(d)
        self.log("val_dice", d, prog_bar=True, sync_dist=True)

    def on_train_epoch_end(self):
        new = torch.stack(self.fold_dice).mean().item()
        a = self.hparams.ema_alpha
        self.ema_dice = new if self.ema_dice is None else a * self.ema_dice + (1 - a) * new
        if self.best_ema_dice is None or self.ema_dice > self.best_ema_dice:
            self.best_ema_dice = self.ema_dice
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/checkpoint_best.pth")  # <- here

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.99, nesterov=True)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.PolynomialLR(opt, 200, 0.9)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    L.seed_everything(1234)
    torch.set_num_threads(1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=5)
    trainer.fit(
        UNetLite(lr=args.lr),
        DataLoader(Phantoms(160, seed=1), batch_size=8, shuffle=True),
        DataLoader(Phantoms(24, seed=2), batch_size=4),
    )
