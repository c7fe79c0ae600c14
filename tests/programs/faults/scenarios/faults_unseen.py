"""Trainings that go wrong in known ways, and that were written after the rules which judge them."""

import os
import re
import subprocess
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from samples import Claimed, stored
from torch.utils.data import DataLoader
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, Here, MeetingNet, Net, rows
from truths import Moment, fault


@fault("gil-held", ranks=(-1,), at={Moment.MIDDLE: (2, 3)})
def expression_that_backtracks(here: Here) -> None:
    def clean(net: Net) -> None:
        if here.is_hit:
            here.begins()
            re.match("(a+)+b", "a" * 60)  # <- here

    here.fit(clean)


@fault("rank-zero-only-work", ranks=(0,), at={Moment.VALIDATION: (3,)})
def table_of_predictions(here: Here) -> None:
    import pandas  # takes half a second, in every rank of every case

    class Tabled(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if self.local_rank == 0:
                here.begins()
                pandas.Series(range(10**7)).map(slowly)

    here.fit(net=Tabled(here))


def slowly(value: int) -> str:
    return f"{value ** (value % 9)}"  # <- table_of_predictions


@fault("rank-behind", ranks=(1,), at={Moment.MIDDLE: (3,)}, has_phase=False)
def gradients_that_are_clipped_slowly(here: Here) -> None:
    class Clipped(Net):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            if here.is_hit and self.global_step == 3:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

    here.fit(net=Clipped(here))


@fault("late-at-init", ranks=(2,), at={Moment.START: (3,)})
def program_that_fetches_data(here: Here) -> None:
    class Fetched(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            if here.is_hit:
                here.begins()
                subprocess.run(["sleep", str(FOR_LONG_S)], check=True)  # <- here

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Fetched())


# What a save calls is the user's own code; the save itself has not begun.
@fault("rank-zero-only-work", ranks=(0,), at={Moment.EPOCH_END: (3,)}, has_phase=False)
def state_that_is_collected_slowly(here: Here) -> None:
    class Buffered(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if here.is_hit:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

    here.fit(net=Buffered(here), enable_checkpointing=True, callbacks=[ModelCheckpoint(here.folder / "checkpoints")])


@fault("slow-logger", ranks=(0,), at={Moment.START: (2,)}, has_phase=False)
def hyperparameters_that_are_sent(here: Here) -> None:
    class Server(CSVLogger):
        @rank_zero_only
        def log_hyperparams(self, params: Any = None) -> None:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    net = Net(here)
    net.save_hyperparameters({"rate": 0.001})
    here.fit(net=net, logger=Server(str(here.folder)))


@fault("diverged-collectives", ranks=(0,), at={Moment.MIDDLE: (3, 4)})
def gathered_where_the_loss_is_high(here: Here) -> None:
    def gather(net: Net) -> None:
        if here.is_hit:
            here.begins()
            net.all_gather(torch.ones(11))  # <- here

    here.fit(gather)


@fault("uneven-batches", ranks=(0,), at={Moment.EPOCH_END: (3,)}, has_line=False, has_phase=False)
def worker_whose_stream_ends_early(here: Here) -> None:
    here.begins()
    stream = Claimed(BATCHES - 3 * here.is_hit, here.rank, BATCHES)
    here.fit(data=DataLoader(stream, batch_size=BATCH_SIZE, num_workers=1), max_epochs=1)


@fault("worker-died", ranks=(1,), at={Moment.MIDDLE: (3,)}, has_line=False, has_phase=False)
def worker_that_exits(here: Here) -> None:
    def leave() -> None:
        os._exit(1)

    here.fit(data=stored(here, leave, num_workers=2))


@fault("dead-rank", ranks=(-1,), at={Moment.VALIDATION: (3,)}, has_line=False, has_phase=False)
def aborted_process(here: Here) -> None:
    def abort(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os.abort()

    here.fit(abort, net=MeetingNet(here))


@fault("failed-rank", ranks=(0,), at={Moment.VALIDATION: (4,)})
def metric_that_fails(here: Here) -> None:
    class Scored(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
                torch.stack([])  # <- here

    here.fit(net=Scored(here))


@fault("mismatched-collective", ranks=(-1,), at={Moment.MIDDLE: (3,)})
def losses_of_unequal_precision(here: Here) -> None:
    def average(net: Net) -> None:
        here.begins()
        losses = torch.ones(40_000, dtype=torch.bfloat16 if here.is_hit else torch.float32)
        torch.distributed.all_reduce(losses)  # <- here

    here.fit(average)
