"""A process with little memory: stock workers make batches ahead until there is none left, fitted ones do not."""

import multiprocessing
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_byte
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.loaders.tuning.budget import budget_of
from lightning_ncclsafe.loaders.tuning.tuner import Tuner
from lightning_ncclsafe.probes.host.capacity import capacity
from lightning_ncclsafe.settings import TunerSettings

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
FORK = multiprocessing.get_context("fork")
BATCH_BYTES = 4 << 20
BATCHES, AHEAD = 100, 250
# For threads' stacks (8 MiB each) and some 15 batches in each process.
ROOM_BYTES = 80 << 20
SLOW_EVERY, SLOW_S, STEP_S = 20, 0.15, 0.02


class Scans(Dataset[Any]):
    """Batches in the memory of the worker that makes them; some come late, which is what a long queue is for."""

    def __init__(self) -> None:
        # By index, as one that is made for workers that end is made again; read by all processes.
        self.made = FORK.Array(c_byte, 4 * AHEAD, lock=False)
        self.is_full = FORK.Event()
        self.is_slow = False

    def __len__(self) -> int:
        return 4 * AHEAD if not self.is_slow else BATCHES

    def __getitem__(self, index: int) -> Any:
        if self.is_slow and index % SLOW_EVERY == SLOW_EVERY - 1:
            time.sleep(SLOW_S)
        try:
            scan = np.ones(BATCH_BYTES, dtype=np.uint8)
        except MemoryError:
            self.is_full.set()
            raise
        self.made[index] = 1
        return scan


def only(samples: list[Any]) -> Any:
    return samples[0]


def loader_of(scans: Scans, **settings: Any) -> DataLoader[Any]:
    return DataLoader(scans, 1, collate_fn=only, num_workers=4, prefetch_factor=AHEAD, **settings)


def in_little_memory(act: Callable[[], Any]) -> Any:
    """What a function gives in a process that may have 80 MiB more than it has now."""
    receiver, sender = FORK.Pipe(duplex=False)

    def body() -> None:
        torch.set_num_threads(1)
        limit = psutil.Process().memory_info().data + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            sender.send(act())
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")

    child = FORK.Process(target=body)
    child.start()
    sender.close()
    try:
        assert receiver.poll(30), "no answer"
        return receiver.recv()
    finally:
        with suppress(psutil.Error):
            for worker in psutil.Process(child.pid).children():
                worker.kill()
        child.kill()
        child.join()


def stock() -> Any:
    scans = Scans()
    iterator = iter(loader_of(scans, timeout=3))
    assert scans.is_full.wait(20), "there was enough"
    return sum(1 for _ in iterator)


def fitted() -> Any:
    """How many batches came, the most that were made and not yet taken, and what of all that there is memory for."""
    scans = Scans()
    scans.is_slow = True
    own = capacity()
    tuner = Tuner(TunerSettings(), MemoryExchange(), rank=0, world_size=1, capacity=own, say=lambda text: None)
    tuner.start()
    loader = loader_of(scans)
    (begin,) = tuner.take("train_dataloader", [loader])
    assert begin is not None
    taken = most = 0
    try:
        for _ in begin(lambda: iter(loader)):
            taken += 1
            time.sleep(STEP_S)
            most = max(most, sum(scans.made[taken:]))
    finally:
        tuner.close()
    return taken, most, budget_of(own, [own]).memory_bytes


def test_stock_workers_exceed_the_memory_limit() -> None:
    died = in_little_memory(stock)
    assert isinstance(died, str) and "MemoryError" in died, died


def test_tuned_workers_stay_within_the_memory_limit() -> None:
    found = in_little_memory(fitted)
    assert not isinstance(found, str), found
    taken, most, budget_bytes = found
    assert taken == BATCHES
    assert most >= 2, "it still prefetches batches"
    assert most * BATCH_BYTES <= budget_bytes <= ROOM_BYTES / 2, found
