import random

import torch
from torch.utils.data import IterableDataset

ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def sequences(shard, count):
    rng = random.Random(shard)
    for _ in range(count):
        family = rng.randrange(4)
        bias = ACIDS[family * 5 : family * 5 + 5]
        yield "".join(rng.choice(bias if rng.random() < 0.4 else ACIDS) for _ in range(rng.randint(20, 60))), family


class ShardStream(IterableDataset):
    """The shards of a rank hold different numbers of sequences."""

    def __init__(self, rank, batch_size=12):
        self.rank, self.batch_size = rank, batch_size
        self.count = 400 + 90 * rank

    def __iter__(self):
        batch = []
        for text, family in sequences(self.rank, self.count):
            batch.append((text, family))
            if len(batch) == self.batch_size:
                yield self._collate(batch)
                batch = []

    @staticmethod
    def _collate(batch):
        counts = torch.tensor([[t.count(a) for a in ACIDS] for t, _ in batch], dtype=torch.float32)
        return counts / counts.sum(1, keepdim=True), torch.tensor([f for _, f in batch])
