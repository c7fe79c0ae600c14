"""Podcast transcripts: each show has a few hosts, and its episodes are stored as one file of token counts."""

import json
import random
from pathlib import Path

import torch
from torch.utils.data import Dataset

VOCAB = 300


def write_shows(folder, shows=24, seed=14):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for s in range(shows):
        topic = s % 6
        rows = []
        for _ in range(30):
            words = [
                rng.randrange(topic * 50, topic * 50 + 50) if rng.random() < 0.5 else rng.randrange(VOCAB)
                for _ in range(40)
            ]
            rows.append({"topic": topic, "words": words, "minutes": 240 if s == 17 else rng.randint(10, 25)})
        (folder / f"show_{s:02d}.json").write_text(json.dumps(rows))


class Episodes(Dataset):
    """Keeps the spectrogram of every episode it has seen, since decoding is slow."""

    def __init__(self, folder, rank, world_size, rate=2000):
        self.files = sorted(Path(folder).glob("show_*.json"))[rank::world_size]
        self.rows = [row for f in self.files for row in json.loads(f.read_text())]
        self.rate = rate
        self.decoded = {}

    def __len__(self):
        return len(self.rows)

    def _spectrogram(self, i):
        if i not in self.decoded:
            g = torch.Generator().manual_seed(i)
            self.decoded[i] = torch.rand(self.rows[i]["minutes"], self.rate, generator=g)
        return self.decoded[i]

    def __getitem__(self, i):
        counts = torch.bincount(torch.tensor(self.rows[i]["words"]), minlength=VOCAB).float()
        loudness = self._spectrogram(i)[:, :50].mean(0)
        return torch.cat([counts, loudness]), self.rows[i]["topic"]
