import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset


class DailyClicks(IterableDataset):
    """Whole batches from the days of this rank. All ranks end together, with the first that has no batch left."""

    def __init__(self, root: Path, rank: int, world_size: int, batch_size: int):
        self.files = sorted(root.glob("day*.jsonl"))[rank::world_size]
        self.batch_size = batch_size
        self.group = dist.new_group(backend="gloo") if world_size > 1 else None

    def batches(self):
        rows = []
        for path in self.files:
            for line in path.read_text().splitlines():
                rows.append(json.loads(line))
                if len(rows) == self.batch_size:
                    yield (torch.tensor([r["x"] for r in rows]), torch.tensor([float(r["clicked"]) for r in rows]))
                    rows = []

    def __iter__(self):
        source = self.batches()
        while True:
            batch = next(source, None)
            left = torch.tensor(int(batch is not None))
            if self.group is not None:
                dist.all_reduce(left, op=dist.ReduceOp.MIN, group=self.group)
            if not left:
                return
            yield batch
