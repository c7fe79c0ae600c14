import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def draw(n, seed):
    """Rings of different sizes."""
    gen = torch.Generator().manual_seed(seed)
    axis = torch.linspace(-1, 1, 16)
    distance = (axis[:, None] ** 2 + axis[None] ** 2).sqrt()
    radius = torch.rand(n, 1, 1, generator=gen)
    return torch.exp(-((distance - radius) ** 2) / 0.02) + 0.05 * torch.randn(n, 16, 16, generator=gen)


class Digits(L.LightningDataModule):
    def __init__(self, train: int = 3200, val: int = 320, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(TensorDataset(draw(self.hparams.train, 0)), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(draw(self.hparams.val, 1)), self.hparams.batch_size)


class AutoEncoder(L.LightningModule):
    def __init__(self, latent: int = 8, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 256), nn.Unflatten(1, (16, 16)))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("train/mse", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val/mse", nn.functional.mse_loss(self(batch[0]), batch[0]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
