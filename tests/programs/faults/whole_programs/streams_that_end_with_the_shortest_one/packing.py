from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset


def documents(rank: int, world: int, n: int, seed: int) -> Iterator[list[int]]:
    lengths = random.Random(seed)
    for i in range(n):
        length = min(4000, int(lengths.lognormvariate(5, 1.2)))
        if i % world == rank:
            rng = random.Random(i)
            yield [rng.randrange(2, 256) for _ in range(length)] + [1]


class Packed(IterableDataset):
    """Documents in blocks of so many tokens; a rest that does not fill a block is dropped."""

    def __init__(self, n: int, block: int, seed: int) -> None:
        self.n, self.block, self.seed = n, block, seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[int] = []
        for document in documents(dist.get_rank(), dist.get_world_size(), self.n, self.seed):
            buffer += document
            while len(buffer) > self.block:
                yield torch.tensor(buffer[: self.block + 1])
                del buffer[: self.block]


class TogetherLoader:
    """Batches of a stream, for as long as every rank has one."""

    def __init__(self, dataset: Packed, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.group: dist.ProcessGroup | None = None
        self.left_over = 0

    def _next(self, stream: Iterator[torch.Tensor]) -> torch.Tensor | None:
        rows = [row for _, row in zip(range(self.batch_size), stream)]
        return torch.stack(rows) if len(rows) == self.batch_size else None

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.group is None:
            self.group = dist.new_group(backend="gloo")
        stream, self.left_over = iter(self.dataset), 0
        while True:
            batch = self._next(stream)
            everyone_has = torch.tensor(int(batch is not None))
            dist.all_reduce(everyone_has, op=dist.ReduceOp.MIN, group=self.group)
            if not everyone_has:
                self.left_over = int(batch is not None)
                return
            yield batch
