"""A variational autoencoder for rings."""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIDE = 24


def rings(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    line = torch.linspace(-1, 1, SIDE)
    radius, x, y = torch.rand(3, count, 1, 1, generator=generator)
    distance = ((line[None, :, None] - y + 0.5).square() + (line[None, None] - x + 0.5).square()).sqrt()
    return torch.exp(-((distance - radius * 0.7) * 6).square()).unsqueeze(1)


class Vae(L.LightningModule):
    def __init__(self, latent: int = 8, beta: float = 0.1, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, SIDE**2), nn.Sigmoid())

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(pictures).chunk(2, dim=1)[0])

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z).view(-1, 1, SIDE, SIDE)

    def elbo(self, pictures: torch.Tensor) -> torch.Tensor:
        mean, log_var = self.encoder(pictures).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        error = nn.functional.mse_loss(self.decode(z), pictures, reduction="none").sum(dim=(1, 2, 3))
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(dim=1)
        return (error + self.hparams.beta * kl).mean()

    def training_step(self, batch, batch_idx):
        loss = self.elbo(batch[0])
        self.log("train_elbo", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_elbo", self.elbo(batch[0]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Rings(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(rings(1280, 0)), batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(rings(160, 1)), batch_size=16)


if __name__ == "__main__":
    LightningCLI(Vae, Rings, save_config_kwargs={"overwrite": True})
