"""Round 15 after public threads: what users of Lightning do that looks odd, and of which nothing is to be said."""

import time
from typing import Any

import torch
from from_threads.round_12_lightning import Scans
from from_threads.round_15_lightning import LIGHTNING
from samples import in_order
from threads import quiet
from torch.utils.data import DataLoader, TensorDataset
from training import BATCHES, Data, Here, LoggingNet, Net
from truths import Moment


class Cleaned(LoggingNet):
    """Takes gradients that are not finite for zeros, so that a bad sample does not spoil the weights."""

    def on_after_backward(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        if not all(gradient.isfinite().all() for gradient in gradients):
            print(f"no update in batch {self.trainer.global_step}", flush=True)
            self.zero_grad()


@quiet(f"{LIGHTNING}/issues/4956", world_size=3)
def gradients_of_a_bad_sample_taken_for_zeros(here: Here) -> None:
    """One rank's loss is not finite, and so are the averaged gradients of all ranks, which all of them clear."""
    hit = here.rank == here.world_size - 1

    class Spoilt(Scans):
        def __getitem__(self, index: int) -> torch.Tensor:
            row = super().__getitem__(index)
            return row / 0 if hit and index // self.here.world_size == BATCHES * 2 else row

    here.fit(net=Cleaned(here), data=in_order(here, Spoilt(here, lambda row: row)))


class Sized(Net):
    """Takes longer, the larger its batches are."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.05 * len(batch[0]))
        return super().training_step(batch, batch_idx)


@quiet(f"{LIGHTNING}/issues/15573", world_size=2, moment=Moment.EPOCH_END)
def batches_as_large_as_each_gpu_has_room_for(here: Here) -> None:
    """One GPU has more memory, and its rank more rows in each batch; both have as many batches."""
    size = 4 + 4 * here.rank
    train = DataLoader(TensorDataset(torch.rand(BATCHES * size, 8)), size)
    here.fit(net=Sized(here), data=train, use_distributed_sampler=False)


class Pretrained(LoggingNet):
    """Reads weights that the memory of the host has room for once only."""

    def on_fit_start(self) -> None:
        path = self.here.folder / "weights.pt"
        if self.trainer.is_global_zero:
            torch.save(self.layers.state_dict(), path)
        self.trainer.strategy.barrier()
        for rank in range(self.trainer.world_size):
            if rank == self.global_rank:
                time.sleep(0.4)
                self.layers.load_state_dict(torch.load(path, map_location=self.device))
            self.trainer.strategy.barrier()


@quiet(f"{LIGHTNING}/issues/9406", world_size=4, moment=Moment.START)
def weights_read_by_one_rank_after_the_other(here: Here) -> None:
    """All wait while one rank reads, and then for the next one, until all have read."""
    here.fit(net=Pretrained(here))


class Cached(Data):
    """The first rank makes the cache while all others wait, and reads it before they do."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        path = self.here.folder / "cache.pt"
        if not self.trainer.is_global_zero:
            self.trainer.strategy.barrier()
        if not path.exists():
            time.sleep(1.2)
            torch.save(torch.rand(8), path)
        self.mean = torch.load(path)
        if self.trainer.is_global_zero:
            self.trainer.strategy.barrier()


@quiet(f"{LIGHTNING}/issues/17733", world_size=3, moment=Moment.START)
def cache_that_the_first_rank_makes_first(here: Here) -> None:
    """The barrier is in two places, of which each rank passes one: the first rank after its work, others before."""
    here.fit(net=LoggingNet(here), data=Cached(here))
