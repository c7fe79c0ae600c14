"""Small 3D U-Net on CT volumes."""

import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from volumes import read_volume, write_volume

from lightning_ncclsafe import SafeDDP

SHAPE = (16, 16, 16)
# case -> scanner; everything else was recorded with A
SCANNER_B = {93}


class Cases(Dataset):
    def __init__(self, paths, augment=False):
        self.paths, self.augment = paths, augment

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        volume = torch.from_numpy(read_volume(self.paths[i], SHAPE))
        mask = (volume > 0.8).long()
        if self.augment and torch.rand(()) < 0.5:
            volume, mask = volume.flip(0), mask.flip(0)
        return volume[None], mask


class CTData(L.LightningDataModule):
    def __init__(self, cases=320, val_cases=32, batch_size=2):
        super().__init__()
        self.cases, self.val_cases, self.batch_size = cases, val_cases, batch_size
        self.root = Path(tempfile.gettempdir()) / "ct_cases"

    def path(self, i):
        return self.root / f"case_{i:04d}.vol"

    def prepare_data(self):
        self.root.mkdir(exist_ok=True)
        for i in range(self.cases + self.val_cases):
            if not self.path(i).exists():
                write_volume(self.path(i), SHAPE, seed=i, scanner="B" if i in SCANNER_B else "A")

    def setup(self, stage=None):
        paths = [self.path(i) for i in range(self.cases + self.val_cases)]
        self.train, self.val = Cases(paths[: self.cases], augment=True), Cases(paths[self.cases :])

    def train_dataloader(self):
        # by date of the recording
        t = self.trainer
        sampler = DistributedSampler(self.train, t.world_size, t.global_rank, shuffle=False)
        return DataLoader(self.train, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv3d(cin, cout, 3, padding=1),
        nn.InstanceNorm3d(cout),
        nn.LeakyReLU(),
        nn.Conv3d(cout, cout, 3, padding=1),
        nn.LeakyReLU(),
    )


class UNet3D(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.down1, self.down2 = double_conv(1, width), double_conv(width, width * 2)
        self.pool, self.up = nn.MaxPool3d(2), nn.ConvTranspose3d(width * 2, width, 2, 2)
        self.last = nn.Sequential(double_conv(width * 2, width), nn.Conv3d(width, 2, 1))

    def forward(self, x):
        a = self.down1(x)
        return self.last(torch.cat([a, self.up(self.down2(self.pool(a)))], 1))


class Segmenter(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = UNet3D()

    def dice(self, logits, mask):
        p = logits.softmax(1)[:, 1]
        m = mask.float()
        return (2 * (p * m).sum() + 1) / (p.sum() + m.sum() + 1)

    def training_step(self, batch, batch_idx):
        x, mask = batch
        logits = self.net(x)
        dice = self.dice(logits, mask)
        loss = nn.functional.cross_entropy(logits, mask) + 1 - dice
        self.log_dict({"loss": loss, "dice": dice}, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, mask = batch
        self.log("val_dice", self.dice(self.net(x), mask), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, nesterov=True)


def main():
    L.seed_everything(42)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=3,
        logger=CSVLogger("."),
        callbacks=[ModelCheckpoint(monitor="val_dice", mode="max"), RichProgressBar()],
        log_every_n_steps=10,
    )
    trainer.fit(Segmenter(), datamodule=CTData())


if __name__ == "__main__":
    main()
