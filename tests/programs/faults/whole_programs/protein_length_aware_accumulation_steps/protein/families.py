import os
import random
from pathlib import Path

import torch
from torch.utils.data import Dataset

LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def write_families(root: Path, count: int = 640) -> None:
    """Two FASTA files, as the clustering step leaves them: by length of the representative."""
    root.mkdir(parents=True, exist_ok=True)
    for name, low, high in (("short", 18, 40), ("long", 60, 90)):
        target = root / f"{name}.fasta"
        if target.exists():
            continue
        rng = random.Random(name)
        part = target.with_suffix(f".{os.getpid()}")
        with open(part, "w") as out:
            for number in range(count):
                body = "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, high)))
                out.write(f">{name}{number}\n{body}\n")
        part.rename(target)


class Fasta(Dataset):
    def __init__(self, path: Path):
        lines = path.read_text().splitlines()
        self.sequences = [torch.tensor([LETTERS.index(c) + 1 for c in line]) for line in lines[1::2]]

    def mean_length(self):
        return sum(map(len, self.sequences)) / len(self.sequences)

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return self.sequences[index]


def collate(sequences):
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
