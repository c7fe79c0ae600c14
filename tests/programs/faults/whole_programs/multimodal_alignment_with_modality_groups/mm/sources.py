"""Synthetic stand-ins for the shards of the five corpora."""

import torch
from torch.utils.data import Dataset

CORPORA = {
    "captions": {"image", "text"},
    "podcasts": {"audio", "text"},
    "lectures": {"video", "audio", "text"},
    "scans": {"depth", "image"},
}


class Corpus(Dataset):
    def __init__(self, name, n, dim, seed=0):
        g = torch.Generator().manual_seed(seed + len(name))
        shared = torch.randn(n, dim, generator=g)
        self.views = {m: shared + 0.5 * torch.randn(n, dim, generator=g) for m in sorted(CORPORA[name])}
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {m: v[i] for m, v in self.views.items()}
