import json
import random
from pathlib import Path

import torch
from torch.utils.data import Dataset

VOCAB = 500


def write_corpus(path, n_docs=600, seed=9):
    rng = random.Random(seed)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as f:
        for i in range(n_docs):
            length = int(rng.lognormvariate(4.2, 0.5))
            if i == 437:
                length = 60_000
            f.write(
                json.dumps(
                    {
                        "id": i,
                        "tokens": [int(rng.paretovariate(0.7)) % VOCAB for _ in range(length)],
                        "label": rng.randrange(5),
                    }
                )
                + "\n"
            )


class Documents(Dataset):
    """A rank's contiguous share of the corpus."""

    def __init__(self, path, rank, world, max_len=64):
        lines = Path(path).read_text().splitlines()
        share = len(lines) // world
        self.docs = [json.loads(line) for line in lines[rank * share : (rank + 1) * share]]
        self.max_len = max_len

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        tokens = self.docs[i]["tokens"][: self.max_len]
        return torch.tensor(tokens + [0] * (self.max_len - len(tokens))), self.docs[i]["label"]
