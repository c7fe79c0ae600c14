"""Character model on subtitles that an external romanizer converts line by line."""

import argparse
import random
import subprocess
import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

LANGUAGES = ["el", "ru", "ka"]
ALPHABET = {"el": range(0x3B1, 0x3C9), "ru": range(0x430, 0x450), "ka": range(0x10D0, 0x10F1)}
VOCAB = 128


class Romanizer:
    """Speaks to romanize.py over its standard streams, one line at a time."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "romanize.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def convert(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip("\n")  # <- here

    def close(self):
        self.process.stdin.close()
        self.process.terminate()


class Subtitles(IterableDataset):
    def __init__(self, language: str, lines: int, seed: int = 0):
        self.language = language
        self.lines = lines
        self.seed = seed

    def __len__(self):
        return self.lines

    def sentences(self):
        rng = random.Random(f"{self.language}{self.seed}")
        letters = [chr(c) for c in ALPHABET[self.language]]
        for _ in range(self.lines):
            words = ["".join(rng.choices(letters, k=rng.randint(2, 7))) for _ in range(8)]
            yield " ".join(words)

    def __iter__(self):
        romanizer = Romanizer()
        try:
            for sentence in self.sentences():
                text = romanizer.convert(sentence)
                yield torch.tensor([min(ord(c), VOCAB - 1) for c in text.ljust(33)[:33]])
        finally:
            romanizer.close()


class SubtitleData(L.LightningDataModule):
    def __init__(self, lines: int, batch_size: int):
        super().__init__()
        self.lines = lines
        self.batch_size = batch_size

    def train_dataloader(self):
        language = LANGUAGES[self.trainer.global_rank % len(LANGUAGES)]
        return DataLoader(Subtitles(language, self.lines), batch_size=self.batch_size)

    def val_dataloader(self):
        language = LANGUAGES[self.trainer.global_rank % len(LANGUAGES)]
        return DataLoader(Subtitles(language, 32, seed=1), batch_size=self.batch_size)


class CharacterModel(L.LightningModule):
    def __init__(self, width: int = 48, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def step(self, batch):
        hidden, _ = self.rnn(self.embed(batch[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.step(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=3200)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(4)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=5, log_every_n_steps=10)
    trainer.fit(CharacterModel(), datamodule=SubtitleData(args.lines, args.batch_size))
