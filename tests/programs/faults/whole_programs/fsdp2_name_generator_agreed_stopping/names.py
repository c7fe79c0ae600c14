import random

import torch
from torch.utils.data import Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = 26
VOCAB = 27
PARTS = [
    "an",
    "ber",
    "cor",
    "da",
    "el",
    "fi",
    "gar",
    "hen",
    "is",
    "jo",
    "ka",
    "li",
    "mar",
    "no",
    "ri",
    "so",
    "ta",
    "us",
]


def invent(rng):
    return "".join(rng.choice(PARTS) for _ in range(rng.randint(1, 4)))


class Names(Dataset):
    def __init__(self, size, seed, width=14):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(size):
            ids = [END] + [LETTERS.index(c) for c in invent(rng)] + [END]
            self.rows.append(torch.tensor((ids + [END] * width)[:width]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def spell(ids):
    return "".join(LETTERS[i] if i < 26 else "." for i in ids).strip(".")
