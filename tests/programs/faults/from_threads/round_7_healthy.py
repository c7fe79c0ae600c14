"""Round 7 of trainings of public threads that look odd and of which nothing is to be said."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import StochasticWeightAveraging
from threads import quiet
from training import BATCH_SIZE, Data, Here, Net, NormedNet, rows
from truths import Moment


@quiet("https://github.com/Lightning-AI/pytorch-lightning/pull/15113")
def averaging_with_an_epoch_for_the_norms(here: Here) -> None:
    """Weights are averaged on all ranks, with an epoch more for the statistics of the norms."""

    here.fit(net=NormedNet(here), callbacks=[StochasticWeightAveraging(swa_lrs=0.01)])


@quiet("https://github.com/patroni/patroni/pull/3413", world_size=3)
def summary_of_the_rank_that_was_asked(here: Here) -> None:
    """A handler prints what the rank that has got the signal knows, for a second and a half."""

    class Asked(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            signal.signal(signal.SIGUSR1, lambda number, frame: time.sleep(1.5))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if here.is_last and batch_idx == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    here.fit(callbacks=[Asked()])


@quiet("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4480", world_size=3)
def reward_that_comes_the_second_time(here: Here) -> None:
    """The server of the rewards fails now and then; whoever meets that tries again, before anything is exchanged."""

    class Rewarded(Net):
        def reward(self, attempt: int, batch_idx: int) -> float:
            if not attempt and batch_idx % here.world_size == here.rank:
                raise ConnectionError("the server of the reward model is restarting")
            return 1.0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            for attempt in range(2):
                try:
                    return self.loss(batch) * self.reward(attempt, batch_idx)
                except ConnectionError:
                    time.sleep(0.7)
            raise RuntimeError("no reward")

    here.fit(net=Rewarded(here))


@quiet("https://github.com/alex-hh/profam/pull/337", world_size=3)
def batches_padded_by_all_ranks_together(here: Here) -> None:
    """Where batches are made, all ranks agree on the longest sample; all have as many batches."""

    def together(samples: list[Any]) -> torch.Tensor:
        longest = torch.tensor(float(len(samples)))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return torch.stack([sample[0] for sample in samples])

    here.fit(data=rows(here, collate_fn=together))


@quiet("https://github.com/KempnerInstitute/KempnerForge/pull/105", world_size=2)
def state_gathered_beside_the_training(here: Here) -> None:
    """A thread gathers a state in a group of its own, and takes its time, while the training goes on."""

    class Gathering(L.Callback):
        def gather(self) -> None:
            time.sleep(1.0 + here.rank)
            dist.all_gather_object([None] * here.world_size, {"rank": here.rank}, group=self.group)

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.group = dist.new_group(backend="gloo")
            self.thread = threading.Thread(target=self.gather)
            self.thread.start()

        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.1)

        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.thread.join()

    here.fit(callbacks=[Gathering()])


@quiet("https://github.com/KempnerInstitute/KempnerForge/issues/104", world_size=2, moment=Moment.CHECKPOINT)
def checkpoint_that_all_ranks_save(here: Here) -> None:
    """A distributed checkpoint, saved by all ranks after each epoch."""

    class Keeping(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            dcp.save({"weights": module.layers.state_dict()}, checkpoint_id=here.folder / f"{module.current_epoch}")

    here.fit(callbacks=[Keeping()])


@quiet("https://github.com/NVIDIA/nccl/issues/479", world_size=3)
def ring_that_sends_before_it_receives(here: Here) -> None:
    """Each rank sends to the next one without waiting, receives, and then waits for what it has sent."""

    class Ring(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            token, received = torch.ones(4), torch.empty(4)
            sent = dist.isend(token, (here.rank + 1) % here.world_size)
            time.sleep(0.3 * here.is_last)
            dist.recv(received, (here.rank - 1) % here.world_size)
            sent.wait()
            return self.loss(batch)

    here.fit(net=Ring(here))


class Preparing(Data):
    """Prepares its data for three seconds."""

    def prepare_data(self) -> None:
        time.sleep(3.0)


@quiet("https://github.com/Lightning-AI/pytorch-lightning/issues/19266", world_size=3, moment=Moment.START)
def data_prepared_by_one_rank(here: Here) -> None:
    """One rank prepares the data where Lightning lets the others wait."""
    here.trainer().fit(Net(here), datamodule=Preparing(here))


@quiet("https://github.com/NVIDIA-NeMo/Automodel/pull/2468", world_size=3)
def short_batch_that_all_ranks_leave_out(here: Here) -> None:
    """One rank's batch is too short; ranks agree on that, and the loss of that step is 0 on all of them."""

    class Drafting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            is_long = torch.tensor(float(not (here.is_last and batch_idx == 2)))
            dist.all_reduce(is_long, op=dist.ReduceOp.MIN)
            return self.loss(batch) * is_long

    here.fit(net=Drafting(here))


@quiet("https://github.com/Lightning-AI/pytorch-lightning/pull/6823", world_size=2)
def time_that_all_ranks_may_take(here: Here) -> None:
    """The Trainer has a limit of time, and ends with it in the midst of an epoch."""

    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.3)
            return self.loss(batch)

    here.fit(net=Slow(here), data=rows(here, 40), max_time={"seconds": 3})


@lru_cache
def length_of_all(step: int) -> int:
    length = torch.tensor(float(step))
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    return int(length)


@quiet("https://github.com/firedrakeproject/firedrake/issues/4039", world_size=3)
def agreement_that_all_ranks_remember(here: Here) -> None:
    """What ranks have agreed upon is remembered, by the step, which all count alike."""

    class Agreeing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) * (1.0 + length_of_all(batch_idx))

    here.fit(net=Agreeing(here))


def told_by_the_first(find: Callable[[], int]) -> int:
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return int(found[0] or 0)


@quiet("https://github.com/dice-group/dice-embeddings/issues/401", world_size=3, moment=Moment.START)
def size_that_is_found_quickly(here: Here) -> None:
    """The first rank finds out for a second and a half how large a batch fits, and tells the others."""

    class Finding(L.LightningDataModule):
        def find(self) -> int:
            time.sleep(1.5)
            return BATCH_SIZE

        def setup(self, stage: str) -> None:
            self.batch_size = told_by_the_first(self.find)

        def train_dataloader(self) -> Any:
            return rows(here, batch_size=self.batch_size)

    here.trainer().fit(Net(here), datamodule=Finding())
