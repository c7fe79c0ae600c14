"""Writes and reads the tokenised corpus: one file per source, one source per rank."""

import json
import random
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

SOURCES = {"wiki": (24, 48), "forum": (12, 40), "books": (50, 64)}
VOCAB = 211


def tokenise(root: Path, documents: int = 640) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, (shortest, longest) in SOURCES.items():
        target = root / f"{name}.jsonl"
        if target.exists():
            continue
        rng = random.Random(name)
        with open(target, "w") as out:
            for _ in range(documents):
                ids = [rng.randrange(1, VOCAB) for _ in range(rng.randint(shortest, longest))]
                out.write(json.dumps({"ids": ids}) + "\n")


class SourceStream(IterableDataset):
    def __init__(self, root: Path, source: str):
        self.path = root / f"{source}.jsonl"

    def __iter__(self):
        with open(self.path) as lines:
            for line in lines:
                yield torch.tensor(json.loads(line)["ids"])


def pad(batch):
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
