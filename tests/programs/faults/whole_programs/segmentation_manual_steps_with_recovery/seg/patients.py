"""Converts the study's volumes to crops; a crop list per patient is kept beside them."""

import json
import random
from pathlib import Path

import torch
from torch.utils.data import Dataset


def convert(root: Path, patients: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for number in range(patients):
        rng = random.Random(number)
        crops = []
        for index in range(24):
            side = rng.choice((24, 32))
            lesions = rng.randint(0, 2)
            if number == 5 and index == 14:
                lesions = 3
            crops.append({"side": side, "lesions": lesions, "seed": number * 100 + index})
        target = root / f"patient{number:03d}.json"
        if not target.exists():
            target.write_text(json.dumps(crops))


class Crops(Dataset):
    def __init__(self, root: Path):
        self.crops = []
        for path in sorted(root.glob("patient*.json")):
            self.crops += json.loads(path.read_text())

    def __len__(self):
        return len(self.crops)

    def __getitem__(self, index):
        crop = self.crops[index]
        g = torch.Generator().manual_seed(crop["seed"])
        volume = torch.randn(1, 32, 32, generator=g)
        mask = torch.zeros(32, 32, dtype=torch.long)
        for lesion in range(crop["lesions"]):
            y, x = torch.randint(0, 24, (2,), generator=g).tolist()
            mask[y : y + 6, x : x + 6] = lesion + 1
            volume[0, y : y + 6, x : x + 6] += lesion + 1
        return volume, mask
