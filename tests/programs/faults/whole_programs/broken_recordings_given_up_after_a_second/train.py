"""Bird call classifier; a recording that takes too long to decode is replaced by silence."""

import signal

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

LIMIT = 1.0
SPECIES = 8


class DecodeTimeout(Exception):
    pass


def on_alarm(signum, frame):
    raise DecodeTimeout


def use_alarm(worker_id: int):
    signal.signal(signal.SIGALRM, on_alarm)
    torch.set_num_threads(1)


def decode(codes: np.ndarray, order: int) -> np.ndarray:
    """Undo a linear prediction of the given order, sample by sample."""
    out = np.zeros(len(codes) + order)
    weights = np.full(order, 0.5 / order)
    for i, code in enumerate(codes):
        out[i + order] = code + weights @ out[i : i + order]
    return out[order:]


class Recordings(Dataset):
    def __init__(self, n: int, seed: int):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, SPECIES, n)
        self.lengths = np.full(n, 512)
        self.seeds = rng.integers(0, 2**31, n)
        if n < 200:
            self.lengths[2 * n // 3 | 1] = 3_000_000

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        codes = np.random.default_rng(self.seeds[i]).normal(self.labels[i] * 0.1, 1.0, self.lengths[i])
        signal.setitimer(signal.ITIMER_REAL, LIMIT)  # <- here
        try:
            wave = decode(codes, order=8)[:512]
        except DecodeTimeout:
            wave = np.zeros(512)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return torch.from_numpy(wave).float(), int(self.labels[i])


class BirdCalls(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 32, stride=8), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, SPECIES)
        )

    def forward(self, wave):
        return self.net(wave.unsqueeze(1))

    def training_step(self, batch, batch_idx):
        wave, label = batch
        loss = nn.functional.cross_entropy(self(wave), label)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        wave, label = batch
        self.log("val/acc", (self(wave).argmax(1) == label).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(9)
    train = DataLoader(Recordings(480, seed=1), batch_size=8, shuffle=True, num_workers=1, worker_init_fn=use_alarm)
    val = DataLoader(Recordings(120, seed=2), batch_size=8, num_workers=1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=3, log_every_n_steps=5)
    trainer.fit(BirdCalls(), train, val)


if __name__ == "__main__":
    main()
