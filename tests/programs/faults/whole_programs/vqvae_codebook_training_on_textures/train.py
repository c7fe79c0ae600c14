import argparse

import lightning as L
import torch
from codebook import EMACodebook
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Textures(Dataset):
    """Gratings of random orientation, frequency and colour."""

    def __init__(self, length, size=32):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(i)
        angle, freq, phase = torch.rand(3, generator=gen).tolist()
        axis = torch.linspace(0, 1, self.size)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        angle = torch.tensor(angle * 3.1416)
        wave = torch.sin(6.28 * (2 + 6 * freq) * (x * angle.cos() + y * angle.sin()) + 6.28 * phase)
        colour = torch.rand(3, 1, 1, generator=gen)
        return colour * wave + 0.05 * torch.randn(3, self.size, self.size, generator=gen)


class VQVAE(L.LightningModule):
    def __init__(self, codes=24, dim=16, lr=2e-3, beta=0.25):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, dim, 1)
        )
        self.codebook = EMACodebook(codes, dim)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(dim, 24, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(24, 3, 4, 2, 1)
        )

    def training_step(self, x, batch_idx):
        quant, commit, flat = self.codebook(self.encoder(x))
        recon = F.mse_loss(self.decoder(quant), x)
        restarted = 0
        if self.global_step > 10 and self.global_step % 8 == 0:
            restarted = self.codebook.restart_unused(flat)
        self.log_dict({"recon": recon, "commit": commit}, prog_bar=True)
        self.log("restarted", float(restarted))
        return recon + self.hparams.beta * commit

    def validation_step(self, x, batch_idx):
        quant, _, _ = self.codebook(self.encoder(x))
        self.log("val_recon", F.mse_loss(self.decoder(quant), x), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codes", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(21)
    trainer = L.Trainer(accelerator="cpu", devices=2, max_epochs=args.epochs, strategy=SafeDDP(), log_every_n_steps=10)
    trainer.fit(
        VQVAE(codes=args.codes),
        DataLoader(Textures(1024), 8, shuffle=True),
        DataLoader(Textures(64), 8),
    )
