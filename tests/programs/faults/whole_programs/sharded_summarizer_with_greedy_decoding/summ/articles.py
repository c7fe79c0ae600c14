import json
import random
from pathlib import Path

import torch
from torch.utils.data import Dataset

BOS, EOS, VOCAB = 1, 2, 151


def build(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 320), ("val", 24)):
        target = root / f"{split}.jsonl"
        if target.exists():
            continue
        rng = random.Random(split)
        with open(target, "w") as out:
            for number in range(count):
                length = 20 if split == "val" else rng.randint(12, 24)
                if split == "val" and number == 13:
                    length = 34
                source = [rng.randrange(3, VOCAB) for _ in range(length)]
                out.write(json.dumps({"source": source, "target": source[: length // 4]}) + "\n")


class Articles(Dataset):
    def __init__(self, path: Path):
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return torch.tensor(row["source"]), torch.tensor([BOS, *row["target"], EOS])


def collate(rows):
    return tuple(torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*rows))
