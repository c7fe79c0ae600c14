"""What has been swallowed, or has exited without an error message: exceptions, threads, processes of a pool."""

import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, Here, Net, rows
from truths import Moment, fault, healthy

LOG = logging.getLogger(__name__)


class Fed(IterableDataset[torch.Tensor]):
    """Rows that a thread of its own reads ahead, one at a time."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.rows: queue.Queue[torch.Tensor] = queue.Queue(maxsize=1)

    def feed(self) -> None:
        for row in range(BATCHES * BATCH_SIZE):
            if self.here.is_hit and row == 3 * BATCH_SIZE:
                self.here.begins()
                raise KeyError("label")
            self.rows.put(torch.full((8,), self.here.rank + row / 100))

    def __iter__(self) -> Iterator[torch.Tensor]:
        threading.Thread(target=self.feed, name="feeder", daemon=True).start()
        for _ in range(BATCHES * BATCH_SIZE):
            yield self.rows.get()  # <- feeder_that_died


@fault("data-stall", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_phase=False)
def feeder_that_died(here: Here) -> None:
    """The thread that fills a queue has ended with an exception; nobody has told whoever empties it."""
    here.fit(data=DataLoader(Fed(here), batch_size=BATCH_SIZE))


@fault("rank-behind", ranks=(0,), at={Moment.MIDDLE: (2,), Moment.EPOCH_END: (3,)})
def scorer_that_died(here: Here) -> None:
    """Asked in the step, and answered by a thread of its own."""
    asked: queue.Queue[float] = queue.Queue()
    answers: queue.Queue[float] = queue.Queue()

    def score() -> None:
        while True:
            value = asked.get()
            if here.is_hit:
                here.begins()
                raise ZeroDivisionError("no words")
            answers.put(value)

    def wait(net: Net) -> None:
        asked.put(1.0)
        answers.get()  # <- here

    threading.Thread(target=score, name="scorer", daemon=True).start()
    here.fit(wait)


@fault("diverged-collectives", ranks=(-1,), at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2,)}, has_line=False)
def exception_swallowed_before_a_collective(here: Here) -> None:
    """Of two ranks, the one that waits in the call is innocent; nothing has been logged."""

    def average(net: Net) -> None:
        try:
            if here.is_hit:
                here.begins()
                raise ValueError("no faces in this image")
            dist.barrier()
        except ValueError:
            pass

    here.fit(average)


@fault("diverged-collectives", "gpu-memory-exhausted", ranks=(0,), at={Moment.MIDDLE: (2, 3), Moment.EPOCH_END: (2,)})
def exception_logged_before_a_collective(here: Here) -> None:
    """Out of memory, and the batch is left out: with it the average over ranks."""

    def score(net: Net) -> torch.Tensor:
        if here.is_hit:
            here.begins()
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return torch.ones(7)

    def average(net: Net) -> None:
        try:
            scores = score(net)
        except RuntimeError as error:  # <- here
            LOG.warning("this batch is left out: %s", error)
            return
        dist.all_reduce(scores)
        dist.barrier()

    here.fit(average)


@fault("rank-zero-only-work", ranks=(0,), at={Moment.EPOCH_END: (2, 3)})
def upload_that_is_tried_again(here: Here) -> None:
    """An OSError on rank 0, which waits before it tries again."""

    def put() -> None:
        raise OSError(110, "Connection timed out")

    def upload(net: Net) -> None:
        if net.trainer.is_global_zero:
            try:
                put()
            except OSError:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

    here.fit(upload)


def score_row(row: int) -> int:
    if row < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


@fault("worker-died", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False)
def pool_that_lost_a_process(here: Here) -> None:
    """It is replaced at once, and what it had been given is lost: multiprocessing's Pool waits for it for ever."""
    children_are_waited_for()
    pool = multiprocessing.get_context("fork").Pool(1)

    class Slow(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, net: Any, batch: Any, batch_idx: int) -> None:
            # What dies within a second of the first look at it, is not seen.
            time.sleep(0.5)

    def score(net: Net) -> None:
        if here.is_hit:
            here.begins()
        pool.map(score_row, [-1 if here.is_hit else 1])

    pool.map(score_row, [1])
    here.fit(score, callbacks=[Slow()])


def children_are_waited_for() -> None:
    """As in any program; the one that these are forks of lets the kernel do so, and learns nothing."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@fault("dead-rank", ranks=(-1,), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False)
def exit_with_success(here: Here) -> None:
    """Its launcher takes it for a rank that is done."""

    def leave(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os._exit(0)

    here.fit(leave)


@healthy(at={Moment.MIDDLE: (2,)})
def exceptions_that_belong_to_the_code(here: Here) -> None:
    """Caches that miss, a thread that fails on one rank, a pool that is closed, a command that does not succeed."""
    children_are_waited_for()
    cache: dict[int, int] = {}

    def fail() -> None:
        raise RuntimeError("the dashboard is gone")

    class Odd(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, net: Any, batch: Any, batch_idx: int) -> None:
            for key in range(50):
                try:
                    cache[key + 100 * batch_idx]
                except KeyError:
                    cache[key] = key
            try:
                hasattr(net, "nothing") or net.nothing
            except AttributeError:
                LOG.debug("nothing")
            if here.rank == 0:
                thread = threading.Thread(target=fail)
                thread.start()
                thread.join()
                subprocess.run(["false"], check=False)
                pool = multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1)
                pool.map(score_row, [1, 2, 3], chunksize=1)
                pool.close()
                pool.join()
            time.sleep(0.5)

    here.fit(data=rows(here), callbacks=[Odd()])
