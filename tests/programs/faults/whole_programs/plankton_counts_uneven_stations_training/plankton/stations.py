"""Counts per station; every rank reads the stations of one vessel. Vessels have different numbers of stations."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

VESSELS = {"meteor": 130, "sonne": 171}


def export(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for vessel, stations in VESSELS.items():
        rng = random.Random(vessel)
        rows = [[rng.random() for _ in range(24)] for _ in range(stations * 8)]
        (root / f"{vessel}.json").write_text(json.dumps(rows))


class Stations(IterableDataset):
    def __init__(self, root: Path, mount_seconds: float):
        self.root, self.mount_seconds = root, mount_seconds
        self.mounted = False

    def _read(self, vessel):
        if not self.mounted and vessel == "sonne":
            time.sleep(self.mount_seconds)
        self.mounted = True
        return json.loads((self.root / f"{vessel}.json").read_text())

    def __iter__(self):
        vessel = list(VESSELS)[dist.get_rank() % len(VESSELS)]
        rows = torch.tensor(self._read(vessel))
        random.shuffle(order := list(range(len(rows))))
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(lambda i: (rows[i, :-1], rows[i, -1]), order)


class Together:
    """Iterates a loader on all ranks until the first of them has no more batches."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        source = iter(self.loader)
        while True:
            batch = next(source, None)
            have = torch.tensor(int(batch is not None))
            dist.all_reduce(have, op=dist.ReduceOp.MIN)
            if not have:
                return
            yield batch
