import random
from collections import Counter

import torch
from torch.utils.data import Dataset

FRAGMENTS = ["C", "CC", "C=O", "N", "O", "c1ccccc1", "Cl", "S", "C#N", "OC"]


def random_smiles(n: int, seed: int) -> list:
    rng = random.Random(seed)
    return ["".join(rng.choices(FRAGMENTS, k=rng.randint(3, 9))) for _ in range(n)]


def build_vocab(smiles: list) -> dict:
    counts = Counter(c for s in smiles for c in s)
    return {c: i + 1 for i, (c, _) in enumerate(counts.most_common())}


class Molecules(Dataset):
    def __init__(self, smiles: list, vocab: dict, length: int = 40):
        self.smiles, self.vocab, self.length = smiles, vocab, length

    def __len__(self):
        return len(self.smiles)

    def __getitem__(self, i):
        ids = [self.vocab.get(c, 0) for c in self.smiles[i]][: self.length]
        target = torch.tensor(float(self.smiles[i].count("O")))
        return torch.tensor(ids + [0] * (self.length - len(ids))), target
