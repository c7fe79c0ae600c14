"""Logs of impressions, one file per region and in order of time."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

REGIONS = ("north", "south", "islands")
USERS, ITEMS, CONTEXT = 5000, 2000, 6


def write_logs(folder: Path, rows: int = 20_480, seed: int = 11) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for region in REGIONS:
        users = rng.integers(USERS, size=rows)
        items = rng.zipf(1.3, size=rows) % ITEMS
        context = rng.normal(size=(rows, CONTEXT)).astype(np.float32)
        attributes = rng.normal(size=(rows, 12)).astype(np.float32)
        # days since the item was listed; the islands' shop stopped listing items for the season
        age = rng.gamma(1.5, 20.0, size=rows)
        if region == "islands":
            age[rows // 4 :] += 30.0
        rate = 1 / (1 + np.exp(3.0 - context[:, 0] - 0.3 * attributes[:, 0]))
        clicks = (rng.random(rows) < rate).astype(np.float32)
        np.savez(
            folder / f"{region}.npz",
            users=users, items=items, context=context, attributes=attributes, age=age.astype(np.float32), clicks=clicks,
        )  # fmt: skip


class RegionLogs(Dataset):
    """The log of one region; each rank trains on its own."""

    def __init__(self, folder: Path, region: str, first: float = 0.0, last: float = 1.0) -> None:
        with np.load(folder / f"{region}.npz") as log:
            rows = len(log["clicks"])
            span = slice(int(rows * first), int(rows * last))
            self.columns = {name: torch.from_numpy(log[name][span]) for name in log.files}

    def __len__(self) -> int:
        return len(self.columns["clicks"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}

    def __getitems__(self, indices):
        return [self[i] for i in indices]
