"""Anchor based detection of vehicles on aerial tiles, reduced to its essentials."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ncclsafe import SafeDDP

GRID = 8


class Tiles(Dataset):
    """Tiles of a flight line, in the order in which they were taken; the line crosses a lake."""

    def __init__(self, n: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        self.images = torch.rand(n, 1, 32, 32, generator=g) * 0.1
        self.boxes = []
        for i in range(n):
            count = int(torch.randint(1, 4, (1,), generator=g))
            if n // 2 < i < n // 2 + 9 and i % 2:
                count = 0
            boxes = torch.rand(count, 4, generator=g) * torch.tensor([24.0, 24.0, 6.0, 6.0]) + 2
            for x, y, w, h in boxes.int().tolist():
                self.images[i, 0, y : y + h, x : x + w] += 0.8
            self.boxes.append(boxes)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.boxes[i]


def collate(items):
    return torch.stack([image for image, _ in items]), [boxes for _, boxes in items]


def match(boxes):
    """Index of the anchor cell of every box."""
    cell = 32 / GRID
    return ((boxes[:, 1] // cell).clamp(max=GRID - 1) * GRID + (boxes[:, 0] // cell).clamp(max=GRID - 1)).long()


class Detector(L.LightningModule):
    def __init__(self, tiles: int, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()
        )
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, images):
        return self.head(self.trunk(images)).flatten(2).transpose(1, 2)

    def loss(self, images, boxes):
        matched = [match(b) for b in boxes]
        positives = sum(len(m) for m in matched)
        if positives == 0:
            return torch.zeros((), device=self.device, requires_grad=True)  # <- here
        out = self(images)
        target = torch.zeros(out.shape[:2], device=out.device)
        offsets = []
        for i, (m, b) in enumerate(zip(matched, boxes)):
            target[i, m] = 1.0
            offsets.append(nn.functional.l1_loss(out[i, m, 1:], b / 32, reduction="sum"))
        objectness = nn.functional.binary_cross_entropy_with_logits(out[..., 0], target, reduction="sum")
        return (objectness + torch.stack(offsets).sum()) / positives

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def train_dataloader(self):
        tiles = Tiles(self.hparams.tiles, seed=4)
        sampler = DistributedSampler(tiles, shuffle=False)
        return DataLoader(tiles, batch_size=4, sampler=sampler, collate_fn=collate)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(*batch), prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tiles", type=int, default=512)
    args = parser.parse_args()
    L.seed_everything(21)
    val = DataLoader(Tiles(64, seed=5), batch_size=4, collate_fn=collate)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=10)
    trainer.fit(Detector(tiles=args.tiles), val_dataloaders=val)


if __name__ == "__main__":
    main()
