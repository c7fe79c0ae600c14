import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 24


class Frames(Dataset):
    """A bright spot on noise; the target is a heat map around it."""

    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        self.points = torch.randint(3, SIZE - 3, (n, 2), generator=gen)
        self.seed = seed
        axis = torch.arange(SIZE)
        self.grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        distance = (self.grid - self.points[i]).pow(2).sum(-1)
        target = torch.exp(-distance / 8.0)
        gen = torch.Generator().manual_seed(self.seed * 100_000 + i)
        image = (distance < 3).float() + 0.7 * torch.randn(SIZE, SIZE, generator=gen)
        return image[None], target[None]


class SyntheticFrames(L.LightningDataModule):
    def __init__(self, frames: int = 2400, batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.train, self.val = Frames(self.hparams.frames, 1), Frames(self.hparams.frames // 10, 2)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)


class KeypointModel(L.LightningModule):
    def __init__(self, channels: int = 12, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 5, padding=2), nn.ReLU(), nn.Conv2d(channels, channels, 5, padding=2), nn.ReLU(),
            nn.Conv2d(channels, 1, 3, padding=1),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        image, target = batch
        loss = nn.functional.mse_loss(self.net(image), target)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        image, target = batch
        found, true = (t.flatten(1).argmax(1) for t in (self.net(image), target))
        off = torch.stack([(found // SIZE - true // SIZE), (found % SIZE - true % SIZE)]).float().norm(dim=0)
        self.log("val_pixels_off", off.mean(), sync_dist=True)
        self.log("val_loss", nn.functional.mse_loss(self.net(image), target), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), self.hparams.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=2)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
