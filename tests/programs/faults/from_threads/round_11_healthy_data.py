"""Round 11 after public threads: data, processes and groups that look odd, and of which nothing is to be said."""

import os
import subprocess
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet
from truths import Moment

NO_MORE = -1


class Annotation(L.Callback):
    """After an epoch the first rank hands out samples, one at a time, and tells all others when there are no more."""

    def __init__(self, here: Here, samples: int) -> None:
        self.here, self.samples = here, samples

    def hand_out(self, samples: list[int]) -> None:
        for _ in range(len(samples) + self.here.world_size - 1):
            worker = torch.zeros(1, dtype=torch.long)
            dist.recv(worker)
            dist.send(torch.tensor([samples.pop() if samples else NO_MORE]), dst=int(worker))

    def annotate(self) -> None:
        sample = torch.zeros(1, dtype=torch.long)
        while sample.item() != NO_MORE:
            dist.send(torch.tensor([self.here.rank]), dst=0)
            dist.recv(sample, src=0)
            time.sleep(1.2 if sample.item() == 1 else 0.05)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.hand_out([*range(self.samples)])
        else:
            self.annotate()


@quiet("https://github.com/luca-s/mpi-master-slave/issues/6", world_size=4, moment=Moment.EPOCH_END)
def samples_handed_out_by_the_first_rank(here: Here) -> None:
    """There are fewer samples than ranks, and one of them takes long; the first rank does nothing but hand them out."""
    here.fit(net=LoggingNet(here), callbacks=[Annotation(here, samples=2)])


@quiet("https://github.com/opsengine/cpulimit/issues/62", world_size=3)
def process_that_is_kept_cool(here: Here) -> None:
    """A script stops one rank again and again, and lets it go on each time."""
    limiter = "for turn in $(seq 12); do kill -STOP {0}; sleep 0.15; kill -CONT {0}; sleep 0.1; done"

    class Cooled(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if here.is_last:
                subprocess.Popen(["sh", "-c", limiter.format(os.getpid())], start_new_session=True)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.3)

    here.fit(net=LoggingNet(here), callbacks=[Cooled()])


class PairedReader:
    """The first rank of a pair reads a batch, and sends it to the other one; the second pair's storage is slower."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.pairs: list[Any] = []

    def read(self, number: int) -> torch.Tensor:
        time.sleep(0.4 if self.here.rank == 2 else 0.0)
        return torch.full((BATCH_SIZE, 8), number / 10)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.pairs:
            self.pairs = [dist.new_group([first, first + 1]) for first in range(0, self.here.world_size, 2)]
        source = self.here.rank // 2 * 2
        for number in range(BATCHES):
            sent: list[Any] = [self.read(number) if self.here.rank == source else None]
            dist.broadcast_object_list(sent, src=source, group=self.pairs[source // 2])
            yield sent[0]


@quiet("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2405", world_size=4, moment=Moment.FIRST_STEP)
def documents_read_by_the_first_of_each_pair(here: Here) -> None:
    here.fit(net=LoggingNet(here), data=PairedReader(here))


class Writing(L.Callback):
    """Each rank writes as many shards as it has; all meet as often as the one with the most does."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        shards = 2 + trainer.global_rank
        most = torch.tensor(shards)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        for shard in range(int(most)):
            if shard < shards:
                time.sleep(0.4)
            dist.barrier()


@quiet("https://github.com/OPM/opm-simulators/pull/6769", world_size=3, moment=Moment.EPOCH_END)
def shards_after_each_of_which_some_have_nothing_to_write(here: Here) -> None:
    here.fit(net=LoggingNet(here), callbacks=[Writing()])


class Continued(IterableDataset[torch.Tensor]):
    """Passes over what has been read before, without letting anything else run."""

    def __init__(self, before: int) -> None:
        self.before = before

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = cycle(range(1000))
        next(islice(numbers, self.before, self.before), None)
        for number in numbers:
            yield torch.full((8,), number / 1000)


@quiet("https://github.com/python/cpython/issues/75996", world_size=2, moment=Moment.FIRST_STEP)
def sequences_passed_over_in_one_go(here: Here) -> None:
    """One rank has read much more than the other one."""

    class Passing(LoggingNet):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.2 if batch_idx == IN_THE_MIDDLE else 0.0)

    data = DataLoader(Continued(60_000_000 if here.is_last else 1000), batch_size=BATCH_SIZE)
    here.fit(net=Passing(here), data=data, limit_train_batches=BATCHES)
