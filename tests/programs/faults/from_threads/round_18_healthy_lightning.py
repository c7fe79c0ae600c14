"""Round 18 after public threads: what users of Lightning do that looks like a hang, and is none."""

import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_15_lightning import LIGHTNING
from lightning.pytorch.callbacks import StochasticWeightAveraging
from samples import Stream
from threads import quiet
from torch.utils.data import DataLoader
from training import BATCH_SIZE, BATCHES, Data, Here, LoggingNet, NormedNet, rows
from truths import Moment


@quiet("https://github.com/official-stockfish/nnue-pytorch/pull/474", world_size=2, moment=Moment.END)
def averages_of_a_norm_taken_in_an_epoch_of_their_own(here: Here) -> None:
    """After the last epoch all ranks go through the data once more without learning, for the norm's averages."""
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    here.fit(net=NormedNet(here), callbacks=[averaging], max_epochs=3)


class Videos(L.Callback):
    """Each rank adds a video of its own to the run, whose folder the first rank has chosen."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        chosen = f"run-{time.time_ns()}" if trainer.is_global_zero else None
        run = self.here.folder / trainer.strategy.broadcast(chosen)
        run.mkdir(exist_ok=True)
        time.sleep(0.6 * trainer.global_rank)
        (run / f"video-{trainer.global_rank}.bin").write_bytes(bytes(1000 * (1 + trainer.global_rank)))


@quiet(f"{LIGHTNING}/issues/19453", world_size=3, moment=Moment.EPOCH_END)
def videos_that_each_rank_adds_to_the_run(here: Here) -> None:
    """All ranks write to one folder at the end of an epoch, and the last one takes longest."""
    here.fit(net=LoggingNet(here), callbacks=[Videos(here)])


class FoundSize(L.Callback):
    """Looks for the largest batch for which all ranks have enough memory."""

    def __init__(self, here: Here) -> None:
        self.here, self.size = here, 0

    def fits(self, module: Any, size: int) -> bool:
        """Whether this rank gets through a step with so many rows."""
        try:
            module.layers(torch.rand(size, 8)).mean()
            torch.empty(10**15 if self.here.is_last and size > 8 else size)
        except RuntimeError as error:
            print(f"{size} rows are too many: {error}")
            return False
        return True

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for size in (2, 4, 8, 16, 32):
            if not trainer.strategy.reduce_boolean_decision(self.fits(module, size), all=True):
                break
            self.size = size


@quiet(f"{LIGHTNING}/issues/19789", world_size=3, moment=Moment.START)
def size_of_a_batch_that_all_ranks_have_room_for(here: Here) -> None:
    """The last rank runs out of memory first, and all ranks learn of it before they try a larger size."""
    here.fit(net=LoggingNet(here), callbacks=[FoundSize(here)])


class Prepared(Data):
    """The first rank of a host tokenizes, and the others look every now and then whether it is done."""

    def setup(self, stage: str) -> None:
        done = self.here.folder / "tokenized.done"
        if self.here.rank == 0:
            time.sleep(2.0)
            done.touch()
        while not done.exists():
            time.sleep(0.1)


@quiet("https://github.com/huggingface/trl/issues/7223", world_size=3, moment=Moment.START)
def tokens_that_the_first_rank_of_a_host_prepares(here: Here) -> None:
    """Two ranks wait for a file that the first one writes when it has prepared the data."""
    here.trainer().fit(LoggingNet(here), datamodule=Prepared(here))


class Together:
    """Batches of a stream, until the first of all ranks has no more."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.batches)
        while True:
            batch = next(stream, None)
            goes_on = torch.tensor(0 if batch is None else 1)
            dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
            if not goes_on:
                return
            yield batch


@quiet("https://github.com/lifeiteng/vall-e/pull/93", world_size=3, moment=Moment.EPOCH_END)
def streams_that_all_end_with_the_shortest_one(here: Here) -> None:
    """Streams have different lengths, but before each batch all ranks agree whether everybody has one."""
    stream: Any = DataLoader(Stream(BATCHES + here.rank, first=here.rank), BATCH_SIZE)
    here.fit(net=LoggingNet(here), data=(Together(stream), rows(here, batches=2)))
