"""Round 10 after public threads: odd signals, terminals, databases, refusals and lost processes that do no harm."""

import logging
import os
import pty
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import torch
from samples import in_order
from threads import quiet
from torch.utils.data import Dataset
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, Net
from truths import Moment

LOG = logging.getLogger("train")


def write_hull(points: int, path: Path, is_short_of_memory: bool) -> None:
    """Ends as the kernel ends it when memory is short."""
    time.sleep(0.3)
    if is_short_of_memory:
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_text(str(points / 10))


@quiet("https://github.com/yumorishita/LiCSBAS2/pull/164", world_size=3)
def hull_begun_again_after_a_kill(here: Here) -> None:
    """A process makes a hull for each rank; that of the last rank is killed twice, which the rank notices."""

    class Hulls(LoggingNet):
        def hull(self, points: int) -> float:
            path = here.folder / f"hull-{points}-{here.rank}"
            for attempt in range(4):
                is_short = here.is_last and attempt < 2
                maker = get_context("fork").Process(target=write_hull, args=(points, path, is_short))
                maker.start()
                maker.join()
                if maker.exitcode == 0:
                    return float(path.read_text())
                LOG.warning("attempt %d has ended with %s", attempt, maker.exitcode)
            raise RuntimeError(f"no hull of {points} points")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx in (2, 4):
                self.hull(batch_idx)
            return super().training_step(batch, batch_idx)

    here.fit(net=Hulls(here))


class Status:
    """Shown upon a signal, whether or not it is being changed."""

    def __init__(self) -> None:
        self.lock, self.shown = threading.RLock(), 0
        self.values: dict[str, float] = {}

    def show(self, number: int, frame: Any) -> None:
        with self.lock:
            self.shown += len(str(self.values))

    def update(self, **values: float) -> None:
        with self.lock:
            self.values.update(values)
            time.sleep(0.1)


@quiet("https://github.com/pocoproject/poco/issues/4939", world_size=3)
def status_asked_for_again_and_again(here: Here) -> None:
    """The middle rank gets thirty signals a second; each interrupts what it does."""

    class Monitored(LoggingNet):
        status = Status()

        def on_fit_start(self) -> None:
            signal.signal(signal.SIGUSR1, self.status.show)
            if here.rank == 1:
                asking = f"for turn in $(seq 150); do kill -USR1 {os.getpid()} || exit; sleep 0.03; done"
                self.asking = subprocess.Popen(["sh", "-c", asking])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.status.update(step=batch_idx)
            return super().training_step(batch, batch_idx)

        def on_fit_end(self) -> None:
            if here.rank == 1:
                self.asking.kill()
                self.asking.wait()

    here.fit(net=Monitored(here))


class Scores:
    """In a database of all ranks, in which one can write at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def connection(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=60)

    def create(self) -> None:
        with self.connection:
            self.connection.execute("CREATE TABLE scores (sample INTEGER, score REAL)")

    def add(self, samples: list[int], score: Callable[[int], float]) -> None:
        with self.connection:
            for sample in samples:
                self.connection.execute("INSERT INTO scores VALUES (?, ?)", (sample, score(sample)))


@quiet("https://github.com/optuna/optuna/issues/820", world_size=3)
def scores_written_by_one_rank_after_the_other(here: Here) -> None:
    """Each rank computes within its transaction what it writes, and the others wait until it is committed."""

    class Mining(Net):
        scores = Scores(here.folder / "scores.sqlite")

        def setup(self, stage: str) -> None:
            if self.global_rank == 0:
                self.scores.create()

        def score(self, sample: int) -> float:
            time.sleep(0.08)
            return sample / 10

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx in (1, 4):
                self.scores.add([batch_idx + number for number in range(5)], self.score)
            return self.loss(batch)

    here.fit(net=Mining(here))


class RefusedError(ConnectionError):
    """With how long to wait."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"429 Too Many Requests, retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Hub(Dataset[torch.Tensor]):
    """Samples of a server that refuses each eighth request of one host for a moment."""

    def __init__(self, here: Here) -> None:
        self.here, self.requests = here, 0

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def get(self, index: int) -> torch.Tensor:
        self.requests += 1
        if self.here.is_last and self.requests % 8 == 0:
            raise RefusedError(0.9)
        return torch.full((8,), index / 100)

    def __getitem__(self, index: int) -> torch.Tensor:
        for attempt in range(5):
            try:
                return self.get(index)
            except RefusedError as refused:
                LOG.warning("%d, attempt %d: %s", index, attempt, refused)
                time.sleep(refused.retry_after_s)
        raise ConnectionError(f"sample {index} is not to be had")


@quiet("https://github.com/pytorch/torchtitan/issues/2239", world_size=3, moment=Moment.FIRST_STEP)
def downloads_refused_for_a_moment(here: Here) -> None:
    """A worker of the last rank waits as it is told to, and is slower than the others in every other batch."""
    here.fit(net=LoggingNet(here), data=in_order(here, Hub(here), num_workers=1))


@quiet("https://github.com/tqdm/tqdm/issues/892", world_size=2)
def terminal_stopped_for_a_moment(here: Here) -> None:
    """Somebody presses Ctrl-S to read what the first rank has printed, and Ctrl-Q a second later."""

    class Printing(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                self.screen, self.terminal = pty.openpty()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not trainer.is_global_zero:
                return
            if batch_idx == 2:
                os.write(self.screen, b"\x13")
                threading.Timer(1.2, os.write, (self.screen, b"\x11")).start()
            os.write(self.terminal, f"step {trainer.global_step}\r\n".encode())

    here.fit(net=LoggingNet(here), callbacks=[Printing()])
