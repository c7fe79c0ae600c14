import hashlib
from pathlib import Path

import torch
from torch.utils.data import Dataset

ALPHABET = "ACDEFGHIKLMNPQRSTVWY"


def sequence(i, length=48):
    digest = b"".join(hashlib.sha256(f"{i}-{k}".encode()).digest() for k in range(2))
    return "".join(ALPHABET[b % 20] for b in digest)[:length]


def profile(seq, rounds):
    """A stand-in for the profile search: stretches a hash, which costs some CPU per sequence."""
    key = hashlib.pbkdf2_hmac("sha256", seq.encode(), b"profile", rounds, dklen=len(seq))
    return torch.tensor(list(key), dtype=torch.float32) / 255


class Proteins(Dataset):
    """Profiles are made when a sequence is first read, and cached on disk; the first epoch is slow."""

    def __init__(self, n, cache, rounds=25_000):
        self.n, self.cache, self.rounds = n, Path(cache), rounds
        self.cache.mkdir(parents=True, exist_ok=True)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        seq = sequence(i)
        file = self.cache / f"{i:05d}.pt"
        if file.exists():
            prof = torch.load(file)
        else:
            prof = profile(seq, self.rounds)
            torch.save(prof, file)
        return torch.tensor([ALPHABET.index(c) for c in seq]), prof
