import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class Codec(L.LightningModule):
    def __init__(self, channels: int = 24, latent: int = 8, lr: float = 1e-3, beta: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, channels, 4, 2, 1), nn.SiLU(), nn.Conv2d(channels, 2 * latent, 4, 2, 1)
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(latent, channels, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(channels, 3, 4, 2, 1)
        )

    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        kl = 0.5 * (mean.pow(2) + logvar.exp() - logvar - 1).mean()
        return self.decoder(z), kl

    def training_step(self, batch, batch_idx):
        recon, kl = self(batch)
        loss = F.mse_loss(recon, batch) + self.hparams.beta * kl
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        recon, _ = self(batch)
        self.log("val/psnr", -10 * F.mse_loss(recon, batch).log10(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
