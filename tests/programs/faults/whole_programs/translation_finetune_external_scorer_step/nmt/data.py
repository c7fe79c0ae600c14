import random

import torch
from torch.utils.data import DataLoader, Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def encode(text, length=48):
    ids = [LETTERS.index(c) + 1 for c in text[:length]]
    return torch.tensor(ids + [0] * (length - len(ids)))


def decode(ids):
    return "".join(LETTERS[i - 1] for i in ids.tolist() if i > 0)


class Sentences(Dataset):
    def __init__(self, n, words, seed):
        rng = random.Random(seed)
        self.rows = [" ".join("".join(rng.choices(LETTERS[:26], k=4)) for _ in range(words)) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return encode(self.rows[i])


def dev_set(direction: str) -> Sentences:
    """Six hundred sentences; those of the web domain are longer."""
    return Sentences(600, {"news": 3, "talks": 3, "web": 11}[direction], seed=len(direction))


def loader(dataset, batch_size, shuffle=False):
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)
