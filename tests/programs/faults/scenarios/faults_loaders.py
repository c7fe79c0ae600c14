"""Ranks that wait for their data, and workers that die."""

import os
import signal
import subprocess
import threading
import time
from typing import Any

import lightning as L
import torch
from samples import Stream, stored
from torch.utils.data import DataLoader
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, Here, MeetingNet, rows
from truths import Moment, fault

ALL = ("SafeDDP", "SafeModelParallel", "SafeFSDP")


@fault(
    "data-stall",
    ranks=(-1,),
    at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3, 4), Moment.VALIDATION: (2,)},
    has_phase=False,
    strategies=ALL,
    whose="machine",
)
def storage_that_stops_without_workers(here: Here) -> None:
    def read() -> None:
        time.sleep(FOR_LONG_S)  # <- here

    data = stored(here, read)
    here.fit(net=MeetingNet(here), data=(rows(here), data) if here.case.moment is Moment.VALIDATION else data)


@fault(
    "data-stall",
    ranks=(1,),
    at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3)},
    has_phase=False,
    strategies=ALL,
    whose="machine",
)
def storage_that_stops_with_workers(here: Here) -> None:
    def read() -> None:
        time.sleep(FOR_LONG_S)  # <- here

    here.fit(data=stored(here, read, num_workers=1))


@fault("data-stall", ranks=(0,), at={Moment.MIDDLE: (2,)}, has_phase=False, whose="code")
def slow_collation(here: Here) -> None:
    seen = []

    def collate(samples: list[Any]) -> torch.Tensor:
        seen.append(len(samples))
        if here.is_hit and len(seen) == 4:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here
        return torch.stack([sample[0] for sample in samples])

    here.fit(data=rows(here, collate_fn=collate))


@fault("data-stall", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_phase=False, whose="machine")
def stream_that_stops(here: Here) -> None:
    def wait(row: int) -> None:
        if here.is_hit and row == 3 * BATCH_SIZE:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    here.fit(data=DataLoader(Stream(BATCHES, here.rank, wait), batch_size=BATCH_SIZE))


@fault(
    "worker-died",
    ranks=(1,),
    at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3)},
    has_line=False,
    has_phase=False,
    whose="machine",
)
def killed_worker(here: Here) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    here.fit(data=stored(here, die, num_workers=1))


@fault("worker-died", ranks=(0,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False)
def worker_with_a_bus_error(here: Here) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGBUS)

    here.fit(data=stored(here, die, num_workers=2))


@fault("worker-died", ranks=(1,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False, whose="machine")
def killed_worker_of_which_nobody_is_told(here: Here) -> None:
    """PyTorch is told of dead workers by a signal, which a library of the user's has taken for itself."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Deaf(L.Callback):
        def on_train_start(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    here.fit(data=stored(here, die, num_workers=1, timeout=0), callbacks=[Deaf()])


@fault("data-stall", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_phase=False, whose="code")
def worker_that_waits_for_a_lock(here: Here) -> None:
    """One that another thread held when the worker was forked: nobody will release it there."""
    lock = threading.Lock()
    lock.acquire()

    def read() -> None:
        lock.acquire()  # <- here

    here.fit(data=stored(here, read, num_workers=1))


@fault("data-stall", ranks=(0,), at={Moment.MIDDLE: (2,)}, has_phase=False)
def decoder_that_hangs(here: Here) -> None:
    """A program that is started for each sample."""

    def read() -> None:
        subprocess.run(["sleep", str(FOR_LONG_S)], check=True)  # <- here

    here.fit(data=stored(here, read))
