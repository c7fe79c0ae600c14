"""Ranks that wait for their data, that have not the same data, or run out of it before others do."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, Here, Net, rows
from truths import Moment, fault, odd_one_out

BOTH = ("SafeDDP", "SafeModelParallel")
UNEVEN = (5, 3, 4, 6)


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


@fault(
    "data-stall",
    ranks=(-1,),
    at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3, 4), Moment.VALIDATION: (2,)},
    has_phase=False,
    strategies=BOTH,
)
def storage_that_stops_without_workers(here: Here) -> None:
    def read() -> None:
        time.sleep(FOR_LONG_S)  # <- here

    data = stored(here, read)
    here.fit(net=Met(here), data=(rows(here), data) if here.case.moment is Moment.VALIDATION else data)


class Met(Net):
    """All ranks meet in validation, too."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_loss", self.loss(batch), sync_dist=True)


@fault("data-stall", ranks=(1,), at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3)}, has_phase=False, strategies=BOTH)
def storage_that_stops_with_workers(here: Here) -> None:
    def read() -> None:
        time.sleep(FOR_LONG_S)  # <- here

    here.fit(data=stored(here, read, num_workers=1))


@fault("data-stall", ranks=(0,), at={Moment.MIDDLE: (2,)}, has_phase=False)
def slow_collation(here: Here) -> None:
    seen = []

    def collate(samples: list[Any]) -> torch.Tensor:
        seen.append(len(samples))
        if here.is_hit and len(seen) == 4:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here
        return torch.stack([sample[0] for sample in samples])

    here.fit(data=rows(here, collate_fn=collate))


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


@fault("data-stall", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_phase=False)
def stream_that_stops(here: Here) -> None:
    def wait(row: int) -> None:
        if here.is_hit and row == 3 * BATCH_SIZE:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    here.fit(data=DataLoader(Stream(BATCHES, here.rank, wait), batch_size=BATCH_SIZE))


@fault("worker-died", ranks=(1,), at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False)
def killed_worker(here: Here) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    here.fit(data=stored(here, die, num_workers=1))


@fault("worker-died", ranks=(0,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False)
def worker_with_a_bus_error(here: Here) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGBUS)

    here.fit(data=stored(here, die, num_workers=2))


@fault("worker-died", ranks=(1,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False)
def killed_worker_of_which_nobody_is_told(here: Here) -> None:
    """PyTorch is told of dead workers by a signal, which a library of the user's has taken for itself."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Deaf(L.Callback):
        def on_train_start(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    here.fit(data=stored(here, die, num_workers=1, timeout=0), callbacks=[Deaf()])


# Epochs that end at different times.


@fault("uneven-batches", ranks=(1,), at={Moment.EPOCH_END: (2, 3)}, has_line=False, has_phase=False)
def stream_shorter_than_it_claims(here: Here) -> None:
    here.begins()
    batches = BATCHES - 2 * here.is_hit
    here.fit(data=DataLoader(Claimed(batches, here.rank, BATCHES), batch_size=BATCH_SIZE), max_epochs=1)


@fault("uneven-batches", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False)
def rank_that_ends_its_epoch_early(here: Here) -> None:
    class Enough(Met):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            if here.is_hit and batch_idx == 3:
                here.begins()
                return -1
            return None

    here.fit(net=Enough(here), data=(rows(here), rows(here)))


@fault("uneven-end", ranks=(1,), at={Moment.EPOCH_END: (2, 3)}, has_line=False, has_phase=False)
def streams_of_unequal_length(here: Here) -> None:
    stream = Stream(BATCHES - 2 * here.is_hit, here.rank)
    disagree(here, data=DataLoader(stream, batch_size=BATCH_SIZE))


# What ranks disagree about before the first step.

START = {Moment.START: (2, 3)}


def disagree(here: Here, **trainer_args: Any) -> None:
    here.begins()
    here.fit(**trainer_args)


def common(count: int, **keywords: Any) -> DataLoader[Any]:
    values = torch.arange(8.0 * count).reshape(count, 8)
    return DataLoader(TensorDataset(values), **({"batch_size": BATCH_SIZE} | keywords))


@fault("different-data", ranks=None, at={Moment.START: (2, 3, 4)}, has_line=False, has_phase=False, strategies=BOTH)
def split_without_a_seed(here: Here) -> None:
    """Llama-recipes: the same number of texts on every rank, and not the same texts."""
    np.random.seed(here.rank)
    chosen = np.random.permutation(96)[:48].tolist()
    data = TensorDataset(torch.arange(8.0 * 96).reshape(96, 8))
    disagree(here, data=DataLoader(Subset(data, chosen), batch_size=BATCH_SIZE))


@fault("unequal-samples", ranks=None, at=START, has_line=False, has_phase=False, strategies=BOTH)
def packing_after_a_split(here: Here) -> None:
    """With it the lengths differ, too."""
    disagree(here, data=common(48 + 8 * here.rank))


@fault("unequal-batches", ranks=None, at=START, has_line=False, has_phase=False)
def shards_of_unequal_size(here: Here) -> None:
    first = 1000 * here.rank
    count = UNEVEN[here.rank] * BATCH_SIZE
    data = TensorDataset(torch.arange(8.0 * first, 8.0 * (first + count)).reshape(count, 8))
    disagree(here, data=DataLoader(data, batch_size=BATCH_SIZE), use_distributed_sampler=False)


@fault("same-shard", ranks=None, at=START, has_line=False, has_phase=False)
def stream_that_is_not_split(here: Here) -> None:
    disagree(here, data=DataLoader(Stream(BATCHES), batch_size=BATCH_SIZE))


@fault("loader-count", ranks=odd_one_out, at=START, has_line=False, has_phase=False)
def validation_data_more_on_one_rank(here: Here) -> None:
    data = [rows(here)] * (2 if here.is_last else 1)
    disagree(here, data=(rows(here), data))


@fault("loader-settings", ranks=odd_one_out, at=START, has_line=False, has_phase=False)
def batch_size_by_memory(here: Here) -> None:
    disagree(here, data=common(96, batch_size=3 if here.is_last else 4))


@fault("sampler-disagreement", ranks=None, at=START, has_line=False, has_phase=False)
def sampler_made_for_another_share(here: Here) -> None:
    data = TensorDataset(torch.arange(8.0 * 96).reshape(96, 8))
    sampler: Any = DistributedSampler(data, here.world_size, rank=0, shuffle=False)
    disagree(here, data=DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler))


@fault("sized-and-unsized", ranks=odd_one_out, at=START, has_line=False, has_phase=False)
def stream_on_one_rank(here: Here) -> None:
    loader = DataLoader(Stream(BATCHES, 5.0), batch_size=BATCH_SIZE) if here.is_last else common(24)
    disagree(here, data=loader, use_distributed_sampler=False)


@fault("validation-step", ranks=odd_one_out, at=START, has_line=False, has_phase=False)
def validation_after_other_batches(here: Here) -> None:
    disagree(here, data=(rows(here), rows(here)), val_check_interval=2 if here.is_last else 3)
