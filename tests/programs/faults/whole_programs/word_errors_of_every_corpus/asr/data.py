"""Synthetic utterances of several corpora, each with its own noise."""

from dataclasses import dataclass

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

SYMBOLS = 12
NOISE = {"studio": 0.1, "meeting": 0.6, "telephone": 1.0}


@dataclass(frozen=True)
class Utterance:
    corpus: str
    features: torch.Tensor
    text: torch.Tensor


def synthesize(corpus: str, number: int) -> Utterance:
    gen = torch.Generator().manual_seed(number)
    text = torch.randint(1, SYMBOLS, (int(torch.randint(3, 8, (1,), generator=gen)),), generator=gen)
    frames = torch.nn.functional.one_hot(text, 20).float().repeat_interleave(4, 0)
    frames = frames + NOISE[corpus] * torch.randn(frames.shape, generator=gen)
    return Utterance(corpus, frames, text)


class CorpusDataset(Dataset):
    def __init__(self, entries):
        self.entries = list(entries)

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, i):
        return synthesize(*self.entries[i])


def collate(batch):
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "x": pad([u.features for u in batch], batch_first=True),
        "x_len": torch.tensor([len(u.features) for u in batch]),
        "y": pad([u.text for u in batch], batch_first=True),
        "y_len": torch.tensor([len(u.text) for u in batch]),
        "corpus": [u.corpus for u in batch],
    }


class Corpora(L.LightningDataModule):
    def __init__(self, corpora: dict[str, int], batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        train, held_out = [], []
        number = 0
        for corpus, size in self.hparams.corpora.items():
            for k in range(size):
                (held_out if k % 18 == 7 else train).append((corpus, number))
                number += 1
        self.train, self.val = CorpusDataset(train), CorpusDataset(held_out)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=collate, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size, collate_fn=collate)
