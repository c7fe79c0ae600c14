import json
import random
from pathlib import Path

import torch
from torch.utils.data import Dataset

WORDS = [f"w{i}" for i in range(150)]


def write_pairs(path, n=960, seed=33):
    rng = random.Random(seed)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as f:
        for i in range(n):
            caption = " ".join(rng.choices(WORDS, k=rng.randint(3, 9)))
            if i == 411:
                caption = ""
            f.write(json.dumps({"image_seed": i, "caption": caption}) + "\n")


class CaptionPairs(Dataset):
    def __init__(self, path):
        self.rows = [json.loads(line) for line in open(path)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        ids = [WORDS.index(w) for w in row["caption"].split()]
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(row["image_seed"]))
        if ids:
            image[0] += sum(ids) / len(ids) / 75 - 1
        return image, ids


def collate(samples):
    images, captions = zip(*samples)
    return torch.stack(images), list(captions)
