"""Audio tagging on mu-law coded clips."""

import struct
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning_ncclsafe import SafeDDP
from timeouts import bounded
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

TAGS, SAMPLES = 10, 2048


def write_clips(folder, n=1800, seed=2):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(n):
        tone = np.sin(np.arange(SAMPLES) * (0.02 + 0.03 * (i % TAGS))) * 0.5 + rng.normal(0, 0.1, SAMPLES)
        body = np.uint8(
            np.clip((np.sign(tone) * np.log1p(255 * np.abs(tone)) / np.log(256) + 1) * 127.5, 0, 255)
        ).tobytes()
        if i == 1798:
            body = body[:0]
        (folder / f"{i:05d}.ulaw").write_bytes(struct.pack("<II", i % TAGS, len(body)) + body)


@bounded(seconds=4)
def decode(path):
    raw = path.read_bytes()
    tag, size = struct.unpack("<II", raw[:8])
    if not size:
        return None
    code = np.frombuffer(raw, np.uint8, size, 8).astype(np.float32) / 127.5 - 1
    return np.sign(code) * (256 ** np.abs(code) - 1) / 255, tag


class Clips(Dataset):
    """This rank's share of the clips, decoded once and kept in memory."""

    def __init__(self, folder, rank, world_size):
        paths = sorted(Path(folder).glob("*.ulaw"))[rank::world_size]
        silence = (np.zeros(SAMPLES, dtype=np.float32), 0)
        self.clips = [decode(path) or silence for path in paths]

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        wave, tag = self.clips[i]
        return torch.from_numpy(wave.astype(np.float32)), int(tag)


class Tagger(L.LightningModule):
    def __init__(self, width=24, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 16, 8),
            nn.ReLU(),
            nn.Conv1d(width, width, 8, 4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(4 * width, TAGS),
        )
        self.bank = nn.Parameter(torch.randn(64, SAMPLES) * 0.01)
        self.mix = nn.Linear(64, TAGS)

    def forward(self, wave):
        return self.net(wave.unsqueeze(1)) + self.mix(torch.tanh(wave @ self.bank.t()))

    def training_step(self, batch, batch_idx):
        wave, tag = batch
        loss = F.cross_entropy(self(wave), tag)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


class ClipData(L.LightningDataModule):
    def prepare_data(self):
        write_clips(Path("clips"))

    def setup(self, stage):
        self.clips = Clips("clips", self.trainer.global_rank, self.trainer.world_size)

    def train_dataloader(self):
        return DataLoader(self.clips, batch_size=2, shuffle=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(6)
    trainer = L.Trainer(accelerator="cpu", devices=3, max_epochs=60, strategy=SafeDDP(), use_distributed_sampler=False)
    trainer.fit(Tagger(), datamodule=ClipData())
