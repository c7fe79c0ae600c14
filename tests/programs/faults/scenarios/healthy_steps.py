"""Trainings whose steps take their time, and of which nothing is to be said."""

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from samples import Stream
from torch.utils.data import DataLoader
from training import BATCH_SIZE, Here, Net, rows
from truths import Moment, healthy

import lightning_ncclsafe
from lightning_ncclsafe import DatasetAgreement

MIDDLE = {Moment.MIDDLE: (2,)}


class Stepping(Net):
    """Every step takes so long on each rank."""

    def __init__(self, here: Here, *step_s: float) -> None:
        super().__init__(here)
        self.step_s = step_s
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        time.sleep(self.step_s[(self.here.rank + self.steps) % len(self.step_s)])
        return super().training_step(batch, batch_idx)


@healthy({Moment.MIDDLE: (2, 4)})
def one_rank_slower_in_each_step(here: Here) -> None:
    """By 30 %, which is what another generation of GPU takes longer."""
    step_s = 1.3 if here.rank == 1 else 1.0
    here.fit(net=Stepping(here, step_s), max_epochs=1)


@healthy(MIDDLE)
def unequal_work_in_turn(here: Here) -> None:
    """Long and short samples: now one rank waits, now the other."""
    here.fit(net=Stepping(here, 1.6, 0.1), max_epochs=1)


@healthy(MIDDLE)
def steps_that_always_take_long(here: Here) -> None:
    """Longer than what is surprising in a run of short ones; it shows in the first of them."""
    here.fit(net=Stepping(here, 2.0 + here.rank), max_epochs=1)


@healthy(MIDDLE)
def accumulated_gradients(here: Here) -> None:
    """Ranks meet in every sixth batch only, and differ by then."""
    net = Stepping(here, 0.5 if here.rank else 0.3)
    here.fit(net=net, data=rows(here, batches=12), accumulate_grad_batches=6, max_epochs=1)


@healthy(MIDDLE)
def manual_optimization(here: Here) -> None:
    class Manual(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                time.sleep(0.4 * here.rank)
                optimizer.step()

    here.fit(net=Manual(here), max_epochs=1)


@healthy(MIDDLE)
def garbage_collections(here: Here) -> None:
    class Collecting(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if here.rank == 1:
                kept = [[] for _ in range(1_000_000)]
                gc.collect()
                del kept

    here.fit(net=Collecting(here), max_epochs=1)


@healthy({Moment.MIDDLE: (3, 4)})
def groups_of_some_ranks(here: Here) -> None:
    """Collectives and messages that are not for all ranks; one pair takes its time."""

    class Grouped(Net):
        def on_train_start(self) -> None:
            self.pair = dist.new_group([0, 1])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if here.rank < 2:
                time.sleep(0.7 * here.rank)
                dist.all_reduce(torch.ones(4), group=self.pair)
            elif here.rank == 2:
                dist.send(torch.ones(3), dst=0)
            if here.rank == 0:
                dist.recv(torch.ones(3), src=2)

    here.fit(net=Grouped(here), max_epochs=1)


@healthy(MIDDLE)
def slow_logger_within_bounds(here: Here) -> None:
    class Slow(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            time.sleep(0.8)
            super().log_metrics(metrics, step)

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    loggers = [Slow(str(here.folder)), TensorBoardLogger(str(here.folder))]
    here.fit(net=Logging(here), logger=loggers, max_epochs=1)


@healthy({Moment.EPOCH_END: (2,)})
def streams_of_equal_length(here: Here) -> None:
    """Which nobody knows: ranks vote before each batch."""
    data = DataLoader(Stream(6, here.rank), batch_size=BATCH_SIZE)
    here.fit(net=Stepping(here, 0.3), data=data, callbacks=[DatasetAgreement(on_uneven="stop_together")])


@healthy(MIDDLE, real_time=True)
def pause_of_a_busy_host(here: Here) -> None:
    """With the thresholds that users have: one rank stands still for a while in the midst of short steps."""

    def pause(net: Net) -> None:
        if here.rank == 1:
            time.sleep(7)

    here.fit(pause, net=Stepping(here, 0.05))


@healthy(MIDDLE, needs="a way to announce a pause")
def debugger_of_which_was_told(here: Here) -> None:
    """Rank 0 is paused in a debugger, and has said so beforehand."""

    def debug(net: Net) -> None:
        if here.rank == 0:
            with lightning_ncclsafe.pause("a debugger"):
                time.sleep(20)

    here.fit(debug)
