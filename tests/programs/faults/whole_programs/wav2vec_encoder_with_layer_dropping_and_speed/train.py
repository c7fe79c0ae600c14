"""Masked prediction on speech features, wav2vec-style encoder, sharded with FSDP2."""

import argparse
import random

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeModelParallel

FEATURES, CODES = 24, 32


class Utterances(Dataset):
    """Utterances of the train split; short ones are played slower, so that batches are alike."""

    def __init__(self, count, frames):
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(frames // 2, frames + 1, (count,), generator=generator).tolist()
        self.frames = frames

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        wave = torch.randn(self.lengths[index], FEATURES, generator=generator).cumsum(0) * 0.1
        if self.lengths[index] < 0.7 * self.frames:
            speed = random.uniform(0.8, 0.95)
            places = (torch.arange(int(len(wave) / speed)) * speed).long().clamp(max=len(wave) - 1)
            wave = wave[places]
        padded = torch.zeros(self.frames, FEATURES)
        wave = wave[: self.frames]
        padded[: len(wave)] = wave
        return padded


class EncoderLayer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, width, depth, layerdrop):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width) for _ in range(depth))
        self.layerdrop = layerdrop

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            rate = self.layerdrop * number / len(self.layers)
            if self.training and random.random() < rate:  # <- here
                continue
            x = layer(x)
        return x


class MaskedPrediction(L.LightningModule):
    def __init__(self, width=48, depth=5, layerdrop=0.2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.project = nn.Linear(FEATURES, width)
        self.mask = nn.Embedding(1, width)
        self.encoder = Encoder(width, depth, layerdrop)
        self.head = nn.Linear(width, CODES)
        self.register_buffer("codebook", torch.randn(CODES, FEATURES, generator=torch.Generator().manual_seed(9)))

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.encoder.layers:
            fully_shard(layer, mesh=mesh)
        for module in (self.project, self.mask, self.head):
            fully_shard(module, mesh=mesh)

    def training_step(self, frames, batch_idx):
        codes = torch.cdist(frames, self.codebook.expand(len(frames), -1, -1)).argmin(-1)
        hidden = self.project(frames)
        masked = torch.rand(frames.shape[:2]) < 0.3
        hidden = torch.where(masked.unsqueeze(-1), self.mask(torch.zeros_like(codes)), hidden)
        logits = self.head(self.encoder(hidden))
        loss = nn.functional.cross_entropy(logits[masked], codes[masked])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layerdrop", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    L.seed_everything(33, workers=True)
    torch.set_num_threads(1)
    data = DataLoader(Utterances(1600, 40), batch_size=4, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=args.epochs,
        log_every_n_steps=20,
    )
    trainer.fit(MaskedPrediction(layerdrop=args.layerdrop), data)


if __name__ == "__main__":
    main()
