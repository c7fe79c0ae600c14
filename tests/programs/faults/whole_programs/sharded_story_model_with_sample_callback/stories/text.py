"""Toy stories: repeated motifs that end with EOS after a length that depends on the motif."""

import torch
from torch.utils.data import Dataset

EOS, VOCAB = 0, 32


def story(motif, g):
    n = 3 + 2 * (motif % 11)
    return [1 + (motif + 3 * k) % (VOCAB - 1) for k in range(n)] + [EOS]


class Stories(Dataset):
    def __init__(self, n, length=24, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.rows = torch.zeros(n, length, dtype=torch.long)
        for row in self.rows:
            tokens = story(int(torch.randint(1, VOCAB, (1,), generator=g)), g)[:length]
            row[: len(tokens)] = torch.tensor(tokens)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]
