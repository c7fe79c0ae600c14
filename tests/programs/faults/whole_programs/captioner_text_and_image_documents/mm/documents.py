import json
import random
from pathlib import Path

import torch
from torch.utils.data import Dataset


def crawl(root: Path, size: int = 960) -> Path:
    """Stands for the crawler: documents with text, most with pictures."""
    index = root / "index.jsonl"
    if index.exists():
        return index
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(11)
    with open(index, "w") as out:
        for number in range(size):
            site = number // 160
            pictures = 0 if site == 2 and rng.random() < 0.8 else rng.randint(1, 3)
            out.write(json.dumps({"id": number, "site": site, "pictures": pictures}) + "\n")
    return index


class Documents(Dataset):
    def __init__(self, index: Path):
        with open(index) as lines:
            self.rows = [json.loads(line) for line in lines]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        g = torch.Generator().manual_seed(row["id"])
        return {
            "tokens": torch.randint(1, 97, (20,), generator=g),
            "images": torch.randn(row["pictures"], 3, 16, 16, generator=g),
            "label": row["site"],
        }


def collate(rows):
    owner = [i for i, row in enumerate(rows) for _ in range(len(row["images"]))]
    return {
        "tokens": torch.stack([row["tokens"] for row in rows]),
        "images": torch.cat([row["images"] for row in rows]),
        "owner": torch.tensor(owner, dtype=torch.long),
        "label": torch.tensor([row["label"] for row in rows]),
    }
