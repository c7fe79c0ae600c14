import csv
from pathlib import Path

import torch
from torch.utils.data import Dataset

LABELS = {"tumor": 0, "stroma": 1, "normal": 2}


class SiteSlides(Dataset):
    def __init__(self, path):
        with Path(path).open() as f:
            self.rows = list(csv.reader(f))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        slide, label, *features = self.rows[i]
        return {
            "slide": slide,
            "x": torch.tensor([float(v) for v in features]),
            "y": LABELS[label.strip().lower()],  # <- here
        }
