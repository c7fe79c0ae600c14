"""Blob VAE; the Frechet distance of generated features is computed after every epoch."""

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(i)
        axis = torch.linspace(-1, 1, 16)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        cy, cx = (torch.rand(2, generator=gen) - 0.5).tolist()
        blob = torch.exp(-8 * ((y - cy) ** 2 + (x - cx) ** 2))
        return (2 * blob - 1).unsqueeze(0)


def matrix_sqrt(a, tol=1e-6):
    """Denman-Beavers iteration."""
    scale = a.norm()
    y, z = a / scale, torch.eye(len(a), dtype=a.dtype)
    while True:
        y_next = 0.5 * (y + torch.linalg.pinv(z))
        z_next = 0.5 * (z + torch.linalg.pinv(y))
        change = (y_next - y).norm() / y.norm()
        y, z = y_next, z_next
        if change < tol:  # <- here
            return y * scale.sqrt()


def frechet_distance(real, fake):
    mu_r, mu_f = real.mean(0), fake.mean(0)
    cov_r, cov_f = torch.cov(real.t()), torch.cov(fake.t())
    root = matrix_sqrt(cov_r @ cov_f)
    return (mu_r - mu_f).pow(2).sum() + torch.trace(cov_r + cov_f - 2 * root)


class FrechetCallback(L.Callback):
    def __init__(self, images, feature_dim=48):
        gen = torch.Generator().manual_seed(0)
        self.projection = torch.randn(256, feature_dim, generator=gen, dtype=torch.float32) / 16
        self.real = self.features(images)

    def features(self, images):
        return torch.relu(images.flatten(1) @ self.projection)

    @rank_zero_only
    def report(self, trainer, model):
        with torch.no_grad():
            fake = model.generator(torch.randn(len(self.real), model.hparams.latent))
        score = frechet_distance(self.real, self.features(fake))
        trainer.logger.log_metrics({"fid": score.item()}, step=trainer.global_step)

    def on_train_epoch_end(self, trainer, pl_module):
        self.report(trainer, pl_module)


class VAE(L.LightningModule):
    def __init__(self, latent=8, lr=2e-3, beta=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.generator = nn.Sequential(
            nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 256), nn.Tanh(), nn.Unflatten(1, (1, 16, 16))
        )

    def training_step(self, images, batch_idx):
        mean, logvar = self.encoder(images).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        recon = F.mse_loss(self.generator(z), images)
        kl = 0.5 * (mean.pow(2) + logvar.exp() - 1 - logvar).mean()
        self.log_dict({"recon": recon, "kl": kl}, prog_bar=True)
        return recon + self.hparams.beta * kl

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(8)
    data = Blobs()
    reference = torch.stack([data[i] for i in range(40)])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=6,
        strategy=SafeDDP(),
        callbacks=[FrechetCallback(reference)],
        log_every_n_steps=10,
    )
    trainer.fit(VAE(), DataLoader(data, batch_size=16, shuffle=True))
