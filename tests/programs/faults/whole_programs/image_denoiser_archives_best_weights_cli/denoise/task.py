import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(L.LightningModule):
    def __init__(self, channels: int = 16, noise: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 1, 3, padding=1),
        )

    def step(self, batch):
        (clean,) = batch
        noisy = clean + self.hparams.noise * torch.randn_like(clean)
        return nn.functional.mse_loss(self.net(noisy), clean)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.step(batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class Patches(L.LightningDataModule):
    def __init__(self, count: int = 1200, batch_size: int = 12):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        grid = torch.linspace(0, 6, 20)
        phase = torch.rand(self.hparams.count, 1, 1, generator=torch.Generator().manual_seed(0)) * 6
        images = torch.sin(grid[None, :, None] + phase) * torch.cos(grid[None, None, :] - phase)
        self.images = TensorDataset(images[:, None])

    def train_dataloader(self):
        return DataLoader(self.images, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.images, batch_size=60)
