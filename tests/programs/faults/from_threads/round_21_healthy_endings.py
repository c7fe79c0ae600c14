"""Round 21 after public threads: ends that are expected, exceptions that are dealt with, and waits that are short."""

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from samples import in_order
from threads import quiet
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, Net, first_tensor
from truths import Moment

log = logging.getLogger(__name__)


def verify(task: tuple[float, bool]) -> float:
    """Computes what an answer is worth, unless its process is killed for it."""
    answer, is_too_long = task
    if is_too_long:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0 + answer


class Rewarded(Net):
    """Learns from what a process says of answers."""

    def on_train_start(self) -> None:
        self.pool = self.new_pool()

    def new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("fork"))

    def rewards(self, answers: list[float], is_too_long: bool) -> list[float]:
        try:
            return [*self.pool.map(verify, [(answer, is_too_long) for answer in answers])]
        except BrokenProcessPool:
            log.warning("a process was killed, and all answers are verified again")
            self.pool = self.new_pool()
            return [*self.pool.map(verify, [(0.0, False) for _ in answers])]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_too_long = batch_idx % self.here.world_size == self.here.rank
        return self.loss(batch) * sum(self.rewards(first_tensor(batch)[:, 0].tolist(), is_too_long))


@quiet("https://github.com/databricks/compose-rl/pull/146")
def pool_made_anew_whenever_it_has_lost_a_process(here: Here) -> None:
    """In each step a process is killed on one rank or the other; that rank has a new pool and verifies once more."""
    here.fit(net=Rewarded(here))


@quiet("https://github.com/mosaicml/llm-foundry/pull/1544", world_size=3, moment=Moment.END)
def model_registered_when_all_other_ranks_have_exited(here: Here) -> None:
    """After the last epoch all ranks but the first exit with status 0; that one takes seconds to register the model."""
    net = Net(here)
    here.fit(net=net)
    if here.rank != 0:
        sys.exit(0)
    for name, tensor in net.state_dict().items():
        time.sleep(0.8)
        torch.save(tensor, here.folder / f"{name}.pt")


class Reader:
    """Reads batches in a thread, which hands over what it raises, and begins anew after that."""

    def __init__(self, here: Here, loader: DataLoader[Any]) -> None:
        self.here, self.loader = here, loader

    def __len__(self) -> int:
        return len(self.loader)

    def read(self, batches: Iterator[Any], number: int) -> None:
        try:
            if number % (self.here.world_size + 1) == self.here.rank:
                time.sleep(0.3)
                raise OSError("the connection was closed")
            self.queue.put(next(batches))
        except OSError as error:
            self.queue.put(error)

    def __iter__(self) -> Iterator[Any]:
        self.queue: queue.Queue[Any] = queue.Queue(1)
        batches, given, number = iter(self.loader), 0, 0
        while given < len(self):
            threading.Thread(target=self.read, args=(batches, number), daemon=True).start()
            batch = self.queue.get(timeout=10)
            number += 1
            if isinstance(batch, OSError):
                log.warning("%r, a new connection is made", batch)
                continue
            given += 1
            yield batch


@quiet("https://github.com/meta-pytorch/data/pull/1003", world_size=3)
def connections_of_a_reading_thread_that_are_made_again(here: Here) -> None:
    """A thread fails now and then, on another rank each time, and says so; its batch is read by the next thread."""
    values = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    here.fit(data=Reader(here, in_order(here, TensorDataset(values))))


class Registry(CSVLogger):
    """Registers checkpoints with a server that wants other names, and never minds."""

    def log_artifact(self, path: str) -> None:
        time.sleep(0.7)
        if "=" in path:
            raise ValueError(f"Invalid artifact path: {path!r}")

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        try:
            self.log_artifact(checkpoint_callback.best_model_path)
        except ValueError:
            log.exception("the checkpoint is not registered")


@quiet("https://github.com/NRCan/geo-deep-learning/issues/603", world_size=2, moment=Moment.CHECKPOINT)
def checkpoints_that_a_registry_does_not_accept(here: Here) -> None:
    """Each checkpoint of the first rank is turned down after most of a second, which its logger catches."""
    checkpoints = ModelCheckpoint(here.folder, filename="{epoch}-{step}", every_n_train_steps=IN_THE_MIDDLE)
    here.fit(logger=Registry(here.folder), callbacks=[checkpoints], enable_checkpointing=True)


class Paired(Net):
    """Compares features with those of all ranks, in halves on all of them where one has no memory for a whole batch."""

    def similarity(self, texts: torch.Tensor) -> torch.Tensor:
        features = self.layers(texts)
        gathered = [torch.empty_like(features) for _ in range(self.here.world_size)]
        dist.all_gather(gathered, features.detach())
        return torch.mean(features @ torch.cat(gathered).T)

    def try_out(self, batch_idx: int) -> None:
        if batch_idx % (self.here.world_size + 1) == self.here.rank:
            time.sleep(0.4)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.81 GiB.")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = torch.tensor(1)
        try:
            self.try_out(batch_idx)
        except torch.OutOfMemoryError:
            parts += 1
        dist.all_reduce(parts, dist.ReduceOp.MAX)
        return torch.stack([self.similarity(part) for part in first_tensor(batch).chunk(int(parts))]).mean()


@quiet("https://github.com/mosaicml/composer/pull/2117", world_size=4)
def batch_in_halves_on_all_ranks_or_on_none(here: Here) -> None:
    """In most steps one rank or another is out of memory, and all ranks agree on how many parts a batch has."""
    here.fit(net=Paired(here))
