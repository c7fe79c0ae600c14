import random
from pathlib import Path

import torch
from torch.utils.data import Dataset

from protlm.fetch import STORE, fetch

AMINO = "ACDEFGHIKLMNPQRSTVWY"


def fill_store(shards: int = 3, sequences: int = 4000) -> None:
    STORE.mkdir(exist_ok=True)
    for s in range(shards):
        path = STORE / f"uniref-{s:02d}.txt"
        if not path.exists():
            rng = random.Random(s)
            lines = ["".join(rng.choices(AMINO, k=48)) for _ in range(sequences)]
            path.with_suffix(".new").write_text("\n".join(lines))
            path.with_suffix(".new").rename(path)


class ProteinShard(Dataset):
    """One shard per rank; shard 2 holds the curated sequences that the tokenizer also reads."""

    def __init__(self, rank: int):
        self.lines = fetch(f"uniref-{rank:02d}.txt", Path("scratch")).read_text().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        ids = torch.tensor([AMINO.index(c) for c in self.lines[i]])
        return ids


def letter_frequencies() -> torch.Tensor:
    text = fetch("uniref-02.txt", Path("scratch")).read_text().replace("\n", "")
    return torch.tensor([float(text.count(c)) for c in AMINO]) / len(text)
