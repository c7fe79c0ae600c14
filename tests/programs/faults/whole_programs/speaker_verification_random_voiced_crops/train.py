"""Speaker embeddings from random voiced crops of long recordings."""

import json
import random
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

RATE, CROP = 2000, 1600


def prepare_corpus(root, speakers=48, per_speaker=6, seed=13):
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    index = []
    for s in range(speakers):
        for u in range(per_speaker):
            n = int(rng.integers(4, 8)) * RATE
            t = np.arange(n) / RATE
            wave = np.sin(2 * np.pi * (80 + 9 * s) * t) * (rng.random(n) * 0.2 + 0.8)
            gate = np.repeat(rng.random(n // 400 + 1) < 0.7, 400)[:n]
            gain = 0.004 if (s, u) == (31, 2) else 0.5
            path = root / f"spk{s:03d}_{u}.npy"
            np.save(path, (gain * wave * gate).astype(np.float32))
            index.append({"path": path.name, "speaker": s})
    (root / "index.json").write_text(json.dumps(index))


class VoicedCrops(Dataset):
    def __init__(self, root, threshold=0.05):
        self.root, self.threshold = Path(root), threshold
        self.index = json.loads((self.root / "index.json").read_text())

    def __len__(self):
        return len(self.index)

    def crop(self, wave):
        start = random.randrange(len(wave) - CROP)
        return wave[start : start + CROP]

    def voiced_crop(self, wave):
        crop = self.crop(wave)
        while np.sqrt(np.mean(crop**2)) < self.threshold:  # <- here
            crop = self.crop(wave)
        return crop

    def __getitem__(self, i):
        entry = self.index[i]
        wave = np.load(self.root / entry["path"], mmap_mode="r")
        crop = torch.from_numpy(np.array(self.voiced_crop(wave)))
        spec = torch.stft(crop, 128, 64, window=torch.hann_window(128), return_complex=True).abs()
        return torch.log1p(spec), entry["speaker"]


class StatsPooling(nn.Module):
    def forward(self, x):
        return torch.cat([x.mean(-1), x.std(-1)], dim=1)


class XVector(L.LightningModule):
    def __init__(self, speakers=48, dim=64, margin=0.1, scale=20.0):
        super().__init__()
        self.save_hyperparameters()
        self.frames = nn.Sequential(nn.Conv1d(65, dim, 5), nn.ReLU(), nn.Conv1d(dim, dim, 3, dilation=2), nn.ReLU())
        self.pool = StatsPooling()
        self.embed = nn.Linear(2 * dim, dim)
        self.weight = nn.Parameter(torch.randn(speakers, dim) * 0.1)

    def forward(self, spec):
        return F.normalize(self.embed(self.pool(self.frames(spec))), dim=1)

    def training_step(self, batch, batch_idx):
        spec, speaker = batch
        cos = self(spec) @ F.normalize(self.weight, dim=1).t()
        cos = cos - self.hparams.margin * F.one_hot(speaker, cos.shape[1])
        loss = F.cross_entropy(self.hparams.scale * cos, speaker)
        self.log("aam_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class SpeakerData(L.LightningDataModule):
    def __init__(self, root="corpus"):
        super().__init__()
        self.root = Path(root)

    def prepare_data(self):
        if not (self.root / "index.json").exists():
            prepare_corpus(self.root)

    def train_dataloader(self):
        return DataLoader(
            VoicedCrops(self.root), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(101, workers=True)
    trainer = L.Trainer(accelerator="cpu", devices=3, max_epochs=15, strategy=SafeDDP(), log_every_n_steps=5)
    trainer.fit(XVector(), datamodule=SpeakerData())
