import json
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import IterableDataset, get_worker_info

LENGTH = 12


class ShardedPairs(IterableDataset):
    def __init__(self, root, rank, world_size):
        self.root = Path(root)
        sizes = json.loads((self.root / "index.json").read_text())
        self.shards = sorted(sizes)[rank::world_size]
        self.pairs = sum(sizes[name] for name in self.shards)

    def __iter__(self):
        worker = get_worker_info()
        step = worker.num_workers if worker else 1
        start = worker.id if worker else 0
        while True:
            for name in self.shards:
                with (self.root / name).open() as file:
                    for line in islice(file, start, None, step):
                        pair = json.loads(line)
                        yield torch.tensor(pair["src"]), torch.tensor(pair["tgt"])
