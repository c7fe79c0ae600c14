import json
import random
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from textnorm import normalise

WORDS = "so we went down to the river and then it was late".split()


def write_manifest(path: Path, n: int, seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        rows.append({"id": f"seg{i:05d}", "text": " ".join(rng.choice(WORDS) for _ in range(4))})
    rows[241]["text"] = "https://cdn.example.org/a/7 " + "hm" * 30 + "!"
    path.write_text("\n".join(json.dumps(r) for r in rows))


class Transcripts(Dataset):
    def __init__(self, manifest: Path):
        self.rows = [json.loads(line) for line in manifest.read_text().splitlines()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]["text"]


def collate(texts):
    ids = [torch.tensor([ord(c) % 128 for c in normalise(t)] or [0]) for t in texts]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return padded[:, :64]


class TranscriptData(L.LightningDataModule):
    def __init__(self, root: str, batch_size: int = 8):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        self.root.mkdir(parents=True, exist_ok=True)
        write_manifest(self.root / "train.jsonl", 960, seed=11)

    def train_dataloader(self):
        return DataLoader(Transcripts(self.root / "train.jsonl"), batch_size=self.batch_size, collate_fn=collate)
