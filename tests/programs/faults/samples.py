"""The data of trainings in which data is what goes wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from training import BATCH_SIZE, BATCHES, Here
from truths import Moment


class Stored(Dataset[torch.Tensor]):
    """Rows of which one, in the share of the rank that is hit, does as it is told when it is read."""

    def __init__(self, here: Here, batch: int, read: Callable[[], None]) -> None:
        self.here, self.batch, self.read = here, batch, read

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        ranks = self.here.world_size
        if index % ranks == self.here.case.ranks[0] and index // ranks == self.batch * BATCH_SIZE:
            self.here.begins()
            self.read()
        return torch.full((8,), index / 100)


def stored(here: Here, read: Callable[[], None], **keywords: Any) -> DataLoader[Any]:
    """Of the batch that is read at the moment of the case."""
    batch = {Moment.FIRST_STEP: 0, Moment.VALIDATION: 1}.get(here.case.moment, 3)
    return in_order(here, Stored(here, batch, read), **keywords)


def in_order(here: Here, data: Dataset[Any], **keywords: Any) -> DataLoader[Any]:
    """Split among ranks without shuffling, which Lightning's own sampler always does for training."""
    sampler: Any = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, **keywords)


class Stream(IterableDataset[torch.Tensor]):
    """So many batches, of a length that nobody knows; ``before`` is called before each row."""

    def __init__(self, batches: int, first: float = 0.0, before: Callable[[int], None] = lambda row: None) -> None:
        self.batches, self.first, self.before = batches, first, before

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(self.batches * BATCH_SIZE):
            self.before(row)
            yield torch.full((8,), self.first + row / 100)


class Claimed(Stream):
    """A stream that claims a length, which need not be true."""

    def __init__(self, batches: int, first: float, claimed: int) -> None:
        super().__init__(batches, first)
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed * BATCH_SIZE
