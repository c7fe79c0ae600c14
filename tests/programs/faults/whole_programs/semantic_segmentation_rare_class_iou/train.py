"""Street-scene segmentation with per-class IoU on the validation set."""

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

CLASSES = ["road", "building", "vegetation", "person", "tram"]


class StreetScenes(Dataset):
    """Procedural scenes: rectangles of the classes on a road."""

    def __init__(self, split, length, size=32):
        self.split, self.length, self.size = split, length, size

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(i * 2 + (self.split == "val"))
        mask = torch.zeros(self.size, self.size, dtype=torch.long)
        for cls in (1, 2, 3):
            y, x = torch.randint(0, self.size - 10, (2,), generator=gen).tolist()
            mask[y : y + 10, x : x + 10] = cls
        if i % 61 == 57:
            y = int(torch.randint(0, self.size - 6, (1,), generator=gen))
            mask[y : y + 6, :] = 4
        image = F.one_hot(mask, len(CLASSES)).permute(2, 0, 1)[:3].float()
        return image + 0.3 * torch.randn(3, self.size, self.size, generator=gen), mask


class UNetish(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.out = nn.Conv2d(width + 3, len(CLASSES), 1)

    def forward(self, x):
        y = self.up(self.mid(self.down(x)))
        return self.out(torch.cat([y, x], dim=1))


class Segmenter(L.LightningModule):
    def __init__(self, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = UNetish()
        self.reset_counts()

    def reset_counts(self):
        self.inter = torch.zeros(len(CLASSES))
        self.union = torch.zeros(len(CLASSES))
        self.seen = torch.zeros(len(CLASSES))

    def training_step(self, batch, batch_idx):
        image, mask = batch
        loss = F.cross_entropy(self.net(image), mask)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.reset_counts()

    def validation_step(self, batch, batch_idx):
        image, mask = batch
        logits = self.net(image)
        pred = logits.argmax(1)
        for c in range(len(CLASSES)):
            p, t = pred == c, mask == c
            self.inter[c] += (p & t).sum()
            self.union[c] += (p | t).sum()
            self.seen[c] += t.sum()
        self.log("val/loss", F.cross_entropy(logits, mask), sync_dist=True)

    def on_validation_epoch_end(self):
        ious = []
        for c, name in enumerate(CLASSES):
            if self.seen[c] == 0:
                continue
            iou = self.inter[c] / self.union[c]
            ious.append(iou)
            self.log(f"val/iou_{name}", iou, sync_dist=True)  # <- here
        self.log("val/miou", torch.stack(ious).mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)}


class SceneData(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(StreetScenes("train", 720), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(StreetScenes("val", 96), self.batch_size)


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(0, workers=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        max_epochs=8,
        strategy=SafeDDP(),
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint(monitor="val/miou", mode="max"), LearningRateMonitor()],
    )
    trainer.fit(Segmenter(), datamodule=SceneData())
