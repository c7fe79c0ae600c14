"""Ranks that do not come as far as the others before the first batch."""

import fcntl
import subprocess
import sys
import time

import lightning as L
import torch
from filelock import FileLock
from training import FOR_LONG_S, Here, Net, rows
from truths import Moment, fault

START = {Moment.START: (2, 3)}
ALL = ("SafeDDP", "SafeModelParallel", "SafeFSDP")


@fault("late-at-init", ranks=(0,), at={Moment.START: (2, 3, 4)}, strategies=ALL)
def data_expanded_in_setup(here: Here) -> None:
    """RecBole: every rank loads all of the data, and one of them is slow at it."""

    def expand(net: Net) -> None:
        kept = []
        if here.is_hit:
            here.begins()
        end = time.monotonic() + (FOR_LONG_S if here.is_hit else 0.3)
        while time.monotonic() < end:
            kept = [*kept[-20:], torch.rand(300, 300).sort()]  # <- here

    here.fit(expand)


@fault("late-at-init", ranks=(-1,), at=START)
def weights_downloaded_by_each_rank(here: Here) -> None:
    class Large(Net):
        def configure_model(self) -> None:
            if here.is_hit:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here
            super().configure_model()

    here.fit(net=Large(here))


@fault("late-at-init", "rank-zero-only-work", ranks=(0,), at=START)
def tokenised_by_rank_zero(here: Here) -> None:
    class Texts(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

        def train_dataloader(self):
            return rows(here)

    here.fit(data=Texts())


@fault("late-at-init", ranks=(-1,), at=START, has_phase=False, is_cold=True)
def work_before_there_is_a_trainer(here: Here) -> None:
    """No guard is there yet: only the others can tell, from outside."""
    if here.is_hit:
        here.begins()
        time.sleep(FOR_LONG_S)  # <- here
    here.fit(strategy=here.strategy(timeout=25.0))


@fault("late-at-init", ranks=(1,), at={Moment.START: (2,)})
def optimizer_made_slowly(here: Here) -> None:
    class Searching(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            if here.is_hit:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here
            return super().configure_optimizers()

    here.fit(net=Searching(here))


class Cached(L.LightningDataModule):
    """Fills a cache under the lock of a file, in `setup`."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def wait_for(self, name: str) -> None:
        while not (self.here.folder / name).exists():
            time.sleep(0.05)

    def train_dataloader(self):
        return rows(self.here)


@fault("late-at-init", "file-lock", ranks=(0,), at={Moment.START: (2, 3)})
def download_under_a_lock(here: Here) -> None:
    """Rank 0 downloads with the lock of the cache, for which all others wait: no rank is in a collective."""

    class Downloaded(Cached):
        def setup(self, stage: str) -> None:
            if here.rank:
                self.wait_for("locked")
            with (here.folder / "cache.lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                (here.folder / "locked").touch()
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

    here.fit(data=Downloaded(here))


@fault("file-lock", ranks=(-1,), at=START, whose="machine")
def cache_locked_by_another_program(here: Here) -> None:
    """What prepares the same cache outside of the job keeps its lock; filelock tries again and again."""

    class Shared(Cached):
        def setup(self, stage: str) -> None:
            if not here.is_hit:
                return
            path = str(here.folder / "cache.lock")
            holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
            assert holder.stdout is not None
            holder.stdout.readline()
            here.begins()
            FileLock(path).acquire()  # <- here

    here.fit(data=Shared(here))


HOLDER = f"""
import fcntl, os, sys, time
if os.fork():
    os._exit(0)
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep({FOR_LONG_S})
"""
