"""Round 21 after public threads: what users of sharded models do that looks odd, and is as it should be."""

import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import SPLIT
from from_threads.round_21_sharded import Rated
from lightning.pytorch.tuner.tuning import Tuner
from torch.distributed.tensor import DTensor
from training import Here, Net, first_tensor, rows
from truths import Moment, healthy


class Asking(Net):
    """Asks all ranks whether there is memory for a batch, and leaves it out if it is missing anywhere."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def fits(self, batch_idx: int) -> bool:
        return (batch_idx + self.global_rank) % 4 != 3

    def training_step(self, batch: Any, batch_idx: int) -> None:
        missing = torch.tensor(0)
        if not self.fits(batch_idx):
            time.sleep(0.8)
            missing += 1
        dist.all_reduce(missing)
        if missing:
            return
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@healthy(
    {Moment.MIDDLE: (3,)},
    source="https://github.com/BioinfoMachineLearning/bio-diffusion/issues/9",
    strategies=SPLIT,
)
def batch_left_out_by_all_ranks_together(here: Here) -> None:
    """Most batches do not fit on some rank, and all ranks leave them out once they have heard of it."""
    here.fit(net=Asking(here))


class Parts(Net):
    """Reduces gradients with the last part of a batch only; ranks take different times for the others."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        layers: Any = self.layers
        *first, last = first_tensor(batch).chunk(4)
        layers.set_requires_gradient_sync(False)
        for part in first:
            time.sleep(0.3 * self.global_rank)
            self.manual_backward(self.loss(part))
        layers.set_requires_gradient_sync(True)
        self.manual_backward(self.loss(last))
        optimizer.step()
        optimizer.zero_grad()


@healthy({Moment.FIRST_STEP: (2,)}, source="https://github.com/pytorch/torchtitan/issues/292", strategies=SPLIT)
def gradients_kept_until_the_last_part(here: Here) -> None:
    """Three parts of each batch exchange no gradients, and one rank takes a second longer for them."""
    here.fit(net=Parts(here), max_epochs=1)


@healthy(
    {Moment.START: (2,)},
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/8983",
    strategies=SPLIT,
)
def rates_tried_by_all_ranks(here: Here) -> None:
    """All ranks look for a learning rate before they train, which is a training that is undone again."""
    net, data, trainer = Rated(here), rows(here), here.trainer()
    Tuner(trainer).lr_find(net, data, num_training=8)
    trainer.fit(net, data)


def graded(answer: str) -> int:
    """The length of an answer; of a long one the kernel kills the process the first time."""
    if len(answer) > 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(answer)


class Again(L.Callback):
    """Grades answers in other processes, and begins anew without those that end a process."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def grades(self, answers: list[str]) -> list[int]:
        try:
            with ProcessPoolExecutor(2, get_context("fork"), signal.signal, (signal.SIGTERM, signal.SIG_DFL)) as pool:
                return list(pool.map(graded, answers))
        except BrokenProcessPool:
            time.sleep(1.0)
            return self.grades([answer[:40] for answer in answers])

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        answers = ["yes", "no " * (20 if trainer.is_global_zero else 2), "perhaps"]
        module.log("grade", float(sum(self.grades(answers))), sync_dist=True)


@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/natcap/taskgraph/issues/116", strategies=SPLIT)
def answers_graded_again_after_a_process_was_killed(here: Here) -> None:
    """A process that grades for the first rank is killed, which that rank notices, and it grades anew."""
    here.fit(callbacks=[Again(here)])


class Norms(L.Callback):
    """One rank after the other looks at the gradients of its own shard."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step % trainer.world_size != trainer.global_rank:
            return
        shards = [one.grad.to_local() for one in module.parameters() if isinstance(one.grad, DTensor)]
        norm = torch.stack([shard.norm() for shard in shards]).norm()
        time.sleep(0.7)
        print(f"[rank {trainer.global_rank}] norm of the shard: {norm:.4f}", flush=True)


@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/pytorch/torchtitan/issues/766", strategies=SPLIT)
def norm_of_the_shard_of_one_rank_at_a_time(here: Here) -> None:
    """In each step another rank computes the norm of its own shard, for which it asks nobody."""
    here.fit(callbacks=[Norms()])
