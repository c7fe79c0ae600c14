"""Contrastive pretraining over several paired modalities, with a process group per modality."""

import argparse

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

PAIRS = [
    ("image", "caption"),
    ("image", "audio"),
    ("video", "caption"),
    ("video", "audio"),
    ("depth", "image"),
    ("thermal", "image"),
    ("imu", "video"),
]
WIDTH = {"image": 48, "caption": 32, "audio": 40, "video": 64, "depth": 24, "thermal": 24, "imu": 12}


class PairedClips(Dataset):
    def __init__(self, samples: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.latent = torch.randn(samples, 16, generator=generator)
        self.views = {name: torch.randn(16, width, generator=generator) for name, width in WIDTH.items()}

    def __len__(self):
        return len(self.latent)

    def __getitem__(self, index):
        return {name: self.latent[index] @ view for name, view in self.views.items()}


class ModalityGroups:
    """One group per modality, so that gathers of different modalities do not queue behind each other."""

    def __init__(self, pairs):
        names = {name for pair in pairs for name in pair}
        ranks = list(range(dist.get_world_size()))
        self.groups = {name: dist.new_group(ranks) for name in names}  # <- here

    def gather(self, name: str, features: torch.Tensor) -> torch.Tensor:
        group = self.groups[name]
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, features.detach().contiguous(), group=group)
        parts[dist.get_rank(group)] = features
        return torch.cat(parts)


class Encoder(nn.Sequential):
    def __init__(self, width: int, embed: int):
        super().__init__(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, embed))


class MultimodalContrast(L.LightningModule):
    def __init__(self, embed: int = 32, temperature: float = 0.07, lr: float = 1e-3, warmup: int = 15):
        super().__init__()
        self.save_hyperparameters()
        self.encoders = nn.ModuleDict({name: Encoder(width, embed) for name, width in WIDTH.items()})
        self.groups = None

    def on_fit_start(self):
        self.groups = ModalityGroups(PAIRS)

    def embed(self, batch):
        return {name: F.normalize(self.encoders[name](x), dim=-1) for name, x in batch.items()}

    def contrast(self, a, b):
        logits = a @ b.T / self.hparams.temperature
        target = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    def training_step(self, batch, batch_idx):
        features = self.embed(batch)
        if self.global_step >= self.hparams.warmup:
            features = {name: self.groups.gather(name, x) for name, x in features.items()}
        losses = {f"{a}-{b}": self.contrast(features[a], features[b]) for a, b in PAIRS}
        loss = torch.stack(list(losses.values())).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        features = self.embed(batch)
        hits = []
        for a, b in PAIRS:
            best = (features[a] @ features[b].T).argmax(dim=1)
            hits.append((best == torch.arange(len(best), device=best.device)).float().mean())
        self.log("val/recall", torch.stack(hits).mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1440)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(21, workers=True)
    train = DataLoader(PairedClips(args.samples), args.batch_size, shuffle=True, drop_last=True)
    val = DataLoader(PairedClips(144, seed=1), args.batch_size)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        gradient_clip_val=1.0,
    )
    trainer.fit(MultimodalContrast(), train, val)


if __name__ == "__main__":
    main()
