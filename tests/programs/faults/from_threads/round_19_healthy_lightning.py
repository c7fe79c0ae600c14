"""Round 19 after public threads: what users of Lightning do that takes long or differs by rank, and is no hang."""

import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_15_lightning import LIGHTNING
from samples import in_order
from threads import quiet
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from training import BATCH_SIZE, BATCHES, Data, Here, LoggingNet, MeetingNet, rows
from truths import Moment


class Averages(L.Callback):
    """Keeps averages of the weights, which take their place for the time of a validation."""

    def __init__(self) -> None:
        self.averages: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *batch: Any) -> None:
        weights = [weight.detach() for weight in module.parameters()]
        self.averages = self.averages or [weight.clone() for weight in weights]
        torch._foreach_lerp_(self.averages, weights, 0.1)

    def swap(self, module: L.LightningModule) -> None:
        for weight, average in zip(module.parameters(), self.averages, strict=True):
            kept = weight.detach().clone()
            weight.data.copy_(average)
            average.copy_(kept)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.swap(module)
        time.sleep(1.0 if trainer.is_global_zero else 0.1)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.swap(module)


@quiet("https://github.com/fadel/pytorch_ema/issues/12", world_size=3, moment=Moment.VALIDATION)
def averages_that_take_the_place_of_weights(here: Here) -> None:
    """All ranks validate with averages of their weights, and the first one needs a second longer to exchange them."""
    here.fit(net=MeetingNet(here), data=(rows(here), rows(here, batches=2)), callbacks=[Averages()])


class Unpadded(Sampler[int]):
    """Each sample once, so that some ranks have one more than others."""

    def __init__(self, here: Here, count: int) -> None:
        self.own = range(here.rank, count, here.world_size)

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[int]:
        return iter(self.own)


class Alone(LoggingNet):
    """Ranks have nothing to do with one another in validation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        time.sleep(0.5)
        self.log("val_loss", self.loss(batch))


@quiet("https://github.com/numenta/nupic.research/pull/264", world_size=3, moment=Moment.VALIDATION)
def validation_with_a_batch_more_on_some_ranks(here: Here) -> None:
    """Validation data is not padded, and no rank asks another one there; the last one is done a batch earlier."""
    samples = TensorDataset(torch.rand(here.world_size * 2 + 2, 8))
    training = in_order(here, TensorDataset(torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)))
    validation: Any = DataLoader(samples, batch_size=1, sampler=Unpadded(here, len(samples)))
    here.fit(net=Alone(here), data=(training, validation), use_distributed_sampler=False)


class Cached(Data):
    """The first rank fills the cache, and gives it to all."""

    def setup(self, stage: str) -> None:
        cache: list[Any] = [None]
        if self.here.rank == 0:
            time.sleep(1.8)
            cache = [torch.rand(BATCHES * BATCH_SIZE * self.here.world_size, 8)]
        dist.broadcast_object_list(cache, src=0)
        self.cache = cache[0]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.cache), BATCH_SIZE)


@quiet("https://github.com/Project-MONAI/MONAI/pull/5365", world_size=4, moment=Moment.START)
def cache_that_the_first_rank_fills_for_all(here: Here) -> None:
    """Three ranks wait in a broadcast until the first one has read everything, which does not take long."""
    here.trainer().fit(LoggingNet(here), datamodule=Cached(here))


class Overlapping(LoggingNet):
    """Two groups have a rank in common, which is asked by the left one before the right one."""

    def setup(self, stage: str) -> None:
        self.left, self.right = dist.new_group([0, 1]), dist.new_group([1, 2])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.4 if self.global_rank == batch_idx % 2 else 0)
        counted = torch.ones(1)
        if self.global_rank in (0, 1):
            dist.all_reduce(counted, group=self.left)
        if self.global_rank in (1, 2):
            dist.all_reduce(counted, group=self.right)
        return super().training_step(batch, batch_idx)


@quiet(f"{LIGHTNING}/pull/15016", world_size=3)
def groups_with_a_rank_in_common(here: Here) -> None:
    """The middle rank adds up with its left neighbour and then with its right one, who waits for both."""
    here.fit(net=Overlapping(here))


class Passing(IterableDataset[torch.Tensor]):
    """Makes the batches of all ranks, and passes over those of others."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(BATCHES * self.here.world_size):
            time.sleep(0.15)
            if number % self.here.world_size == self.here.rank:
                yield torch.rand(BATCH_SIZE, 8)


@quiet("https://github.com/lhotse-speech/lhotse/issues/1399", world_size=4)
def batches_of_others_that_are_passed_over(here: Here) -> None:
    """Each rank makes four batches to keep one of them; the last rank has its first one latest."""
    loader: Any = DataLoader(Passing(here), batch_size=None)
    here.fit(net=LoggingNet(here), data=loader)
