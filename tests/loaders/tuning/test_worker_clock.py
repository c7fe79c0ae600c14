"""Workers are timed from within, whatever start method they have; the user's function is called as before."""

import multiprocessing
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import fetch

from lightning_ncclsafe.loaders.tuning.worker_clock import RING, Service, WorkerClock, _Timed

NAP_S = 0.01


class Napping(Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        time.sleep(NAP_S)
        return index


class Nested(Napping):
    """Reads a loader of its own for each item."""

    def __getitem__(self, index: int) -> int:
        return len([*DataLoader(Napping(), batch_size=3)])


class Busy(Napping):
    """Computes on a thread of its own, as decoders do."""

    def __getitem__(self, index: int) -> int:
        thread = threading.Thread(target=self._compute)
        thread.start()
        thread.join()
        return index

    def _compute(self) -> None:
        end_s = time.thread_time() + 3 * NAP_S
        while time.thread_time() < end_s:
            pass


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        for index in range(4):
            time.sleep(NAP_S)
            yield index


class Failing(Napping):
    def __getitem__(self, index: int) -> int:
        raise ValueError("bad")


class Noted:
    """A user's own function."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None and info.id == worker_id
        (self.folder / f"{worker_id}-{os.getpid()}").touch()


def read(clock: WorkerClock, dataset: Any, workers: int = 1, method: str = "fork") -> list[Service]:
    loader: DataLoader[Any] = DataLoader(
        dataset, num_workers=workers, worker_init_fn=clock, multiprocessing_context=method
    )
    iterator: Any = iter(loader)
    try:
        assert len([*iterator])
    finally:
        # It is kept by an exception's traceback, and ends late when it is collected.
        iterator._shutdown_workers()
    return clock.take()


# forkserver takes as long again, and sends what spawn sends.
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_are_timed(method: str, tmp_path: Path) -> None:
    workers = 2 if method == "fork" else 1
    clock = WorkerClock(workers, Noted(tmp_path))
    services = read(clock, Napping(), workers, method)
    assert len(services) == 6
    assert all(NAP_S <= service.wall_s < 1.0 and 0 <= service.cpu_s < service.wall_s / 2 for service in services)
    assert [path.name[0] for path in sorted(tmp_path.iterdir())] == ["0", "1"][:workers]
    assert clock.take() == []


def test_iterable_datasets_are_timed() -> None:
    assert len(read(WorkerClock(1, None), Stream())) == 4


def test_a_loader_within_a_dataset_counts_once() -> None:
    services = read(WorkerClock(1, None), Nested())
    assert len(services) == 6
    assert min(service.wall_s for service in services) >= 6 * NAP_S


def test_what_threads_of_a_worker_compute_counts() -> None:
    assert min(service.cpu_s for service in read(WorkerClock(1, None), Busy())) >= 3 * NAP_S


def test_only_workers_are_changed() -> None:
    before = fetch._MapDatasetFetcher.fetch
    clock = WorkerClock(1, None)
    clock(0)
    read(clock, Napping())
    assert fetch._MapDatasetFetcher.fetch is before


def test_errors_are_the_datasets_and_the_users() -> None:
    clock = WorkerClock(1, None)
    with pytest.raises(ValueError, match="bad"):
        read(clock, Failing())
    assert clock.take() == []

    def fails(worker_id: int) -> None:
        raise LookupError("of the user")

    with pytest.raises(LookupError, match="of the user"):
        read(WorkerClock(1, fails), Napping())


def test_without_its_memory_a_worker_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WorkerClock(1, None)
    monkeypatch.setattr(clock, "_rows", None)
    loader: DataLoader[Any] = DataLoader(Napping(), num_workers=1, worker_init_fn=clock)
    assert len([*loader]) == 6


def test_the_last_of_many_batches_are_kept_in_order() -> None:
    clock = WorkerClock(2, None)
    timed = _Timed(clock._rows.numpy()[1])
    for number in range(3):
        timed._write(float(number), 0.5)
    assert clock.take() == [Service(0.0, 0.5), Service(1.0, 0.5), Service(2.0, 0.5)]
    for number in range(2 * RING):
        timed._write(float(number), 0.25)
    assert clock.take() == [Service(float(number), 0.25) for number in range(RING, 2 * RING)]


def test_a_clock_shares_its_memory_with_what_it_is_sent_to() -> None:
    clock = WorkerClock(1, None)
    buffer = multiprocessing.reduction.ForkingPickler.dumps(clock)
    sent = pickle.loads(buffer)
    _Timed(sent._rows.numpy()[0])._write(1.0, 0.0)
    assert clock.take() == [Service(1.0, 0.0)]
