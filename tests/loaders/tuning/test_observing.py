"""What is measured of a loader, on a clock that goes as the test says."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ncclsafe.loaders.tuning import observing, worker_memory
from lightning_ncclsafe.loaders.tuning.batch_sizes import bytes_of, tensors_of
from lightning_ncclsafe.loaders.tuning.measures import Measures
from lightning_ncclsafe.loaders.tuning.observing import ObservedLoader, Observer
from lightning_ncclsafe.loaders.tuning.pools import TunedLoader
from lightning_ncclsafe.loaders.tuning.windows import target_gap_s
from lightning_ncclsafe.loaders.tuning.worker_memory import WorkerMemory


class Time:
    """Stands for the module."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.cpu_s = 0.0

    def pass_s(self, wall_s: float, cpu_s: float = 0.0) -> None:
        self.now_s += wall_s
        self.cpu_s += cpu_s

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return 7.0 + self.cpu_s

    def thread_time(self) -> float:
        return self.cpu_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(observing, "time", clock)
    return clock


class Queued:
    """An iterator over workers, as torch's: what is stored, what is queued, what is due."""

    def __init__(self) -> None:
        self._rcvd_idx = 0
        self._task_info: dict[int, tuple[Any, ...]] = {}
        self._tasks_outstanding = 0
        self._data_queue = SimpleNamespace(qsize=lambda: self.queued)
        self.queued = 0

    def holds(self, *stored: int, queued: int) -> None:
        """Batches 0 to 3 were asked for; these have been received."""
        self._task_info = {number: (0, "data") if number in stored else (0,) for number in range(4)}
        self._tasks_outstanding = 4 - len(stored)
        self.queued = queued


class Run:
    """Reads with one observer: a gap, a wait."""

    def __init__(self, clock: Time, workers: int = 0, **keywords: Any) -> None:
        self.windows: list[Measures] = []
        self.clock = clock
        self.observer = Observer(self.windows.append, **keywords)
        self.observer.starts(workers, 2 if workers else 0, None)
        self.iterator: Any = Queued() if workers else object()
        self.batch(0.0, 5.0)  # starts up

    def batch(self, gap_s: float, wait_s: float, batch: Any = None, cpu_s: float = 0.0, gap_cpu_s: float = 0.0) -> None:
        self.clock.pass_s(gap_s, gap_cpu_s)
        self.observer.asked(self.iterator)
        self.clock.pass_s(wait_s, cpu_s)
        self.observer.given(self.iterator, batch)


def test_a_window_without_workers(clock: Time) -> None:
    run = Run(clock, window_s=2.0)
    for _ in range(8):
        run.batch(0.1, 0.2, torch.zeros(10), cpu_s=0.05, gap_cpu_s=0.1)
    (window,) = run.windows
    assert (window.workers, window.prefetch, window.batches, window.batch_bytes) == (0, 0, 8, 40)
    assert window.wall_s == pytest.approx(2.4)
    assert window.gap_s == pytest.approx(0.1)
    assert window.wait_s == window.service_s == window.service_q97_s == pytest.approx(0.2)
    assert window.cpu_share == pytest.approx(0.25)
    assert window.own_cores == pytest.approx(0.5)
    assert window.starved == 1.0


@pytest.mark.parametrize(
    ("step_s", "batches"),
    [(0.01, 100), (0.05, 20), (0.2, 8), (0.3, 7), (0.5, 4), (0.9, 3), (5.0, 3)],
)
def test_when_a_window_ends(clock: Time, step_s: float, batches: int) -> None:
    run = Run(clock)
    for _ in range(batches - 1):
        run.batch(step_s + 1e-6, 0.0)
    assert run.windows == []
    run.batch(step_s + 1e-6, 0.0)
    assert [window.batches for window in run.windows] == [batches]


def test_the_first_batch_of_workers_and_of_an_epoch_is_no_measure(clock: Time) -> None:
    run = Run(clock, least_batches=6)
    run.batch(0.05, 0.15)
    run.observer.starts(0, 0, None)
    run.batch(60.0, 5.0, gap_cpu_s=60.0)
    for _ in range(5):
        run.batch(0.05, 0.15)
    (window,) = run.windows
    assert (window.batches, window.wall_s, window.wait_s) == (6, pytest.approx(1.2), pytest.approx(0.15))
    assert window.own_cores == 0.0


def test_epochs_that_are_short_beside_what_they_take_to_begin_have_a_window_together(clock: Time) -> None:
    run = Run(clock)
    for _ in range(3):
        for _ in range(4):
            run.batch(0.001, 0.001)
        clock.pass_s(0.45)  # workers end, others start
        run.observer.starts(0, 0, None)
        run.batch(0.0, 0.1)
    (window,) = run.windows
    assert (window.batches, window.wall_s) == (8, pytest.approx(0.016))
    run.observer.starts(0, 0, None)
    assert len(run.windows) == 1


def test_another_setting_begins_another_window(clock: Time) -> None:
    run = Run(clock)
    for _ in range(3):
        run.batch(9.0, 0.0)
    run.windows.clear()
    run.batch(9.0, 0.0)
    run.observer.starts(1, 2, None)
    run.iterator = Queued()
    for _ in range(9):
        run.batch(0.25, 0.25)
    window = run.windows[0]
    assert (window.workers, window.gap_s) == (1, pytest.approx(0.25))


def test_a_long_gap_is_no_step(clock: Time) -> None:
    run = Run(clock)
    for gap_s in (0.5, 0.5, 11.0, 0.5, 0.5):
        run.batch(gap_s, 0.0)
    (window,) = run.windows
    assert (window.batches, window.wall_s) == (4, pytest.approx(2.0))


def test_the_gap_to_beat_is_tf_datas() -> None:
    assert target_gap_s([]) == 0.0
    assert target_gap_s([0.2] * 5) == pytest.approx(0.2)
    # Of 1, 3: mean 2, sigma 1; the 100 is out by more than two sigmas of all.
    assert target_gap_s([1.0, 3.0] * 10 + [100.0]) == pytest.approx(1.0)
    # Of 0, 0, 0, 4: mean 1, sigma 1.7.
    assert target_gap_s([0.0, 0.0, 0.0, 4.0] * 3) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("before", "after", "starved"),
    [
        (((), 0), ((), 0), True),  # nothing is there
        (((), 1), ((), 0), False),  # it is in the queue
        (((0,), 0), ((), 0), False),  # it was received before
        (((1,), 0), ((1,), 0), True),  # only one that comes later is there
        (((), 1), ((1,), 0), True),  # what is in the queue comes later
        (((), 2), ((1,), 0), False),  # it is behind one that comes later
    ],
)
def test_starved_is_who_finds_the_batch_that_is_due_missing(
    clock: Time, before: Any, after: Any, starved: bool
) -> None:
    run = Run(clock, workers=2)
    for _ in range(8):
        run.iterator.holds(*before[0], queued=before[1])
        clock.pass_s(0.2)
        run.observer.asked(run.iterator)
        run.iterator.holds(*after[0], queued=after[1])
        run.observer.given(run.iterator, None)
    (window,) = run.windows
    assert window.starved == float(starved)


def test_where_a_queue_cannot_be_looked_into_waiting_is_starving(clock: Time) -> None:
    run = Run(clock, workers=1)

    def qsize() -> int:
        raise NotImplementedError

    run.iterator._data_queue = SimpleNamespace(qsize=qsize)
    for wait_s in (0.0005, 0.0005, 0.002, 0.0005):
        run.batch(0.5, wait_s)
    assert [window.starved for window in run.windows] == [0.25]


def test_without_times_from_within_workers_their_service_is_what_they_could_have_taken(clock: Time) -> None:
    run = Run(clock, workers=3)
    for _ in range(8):
        run.batch(0.1, 0.1)
    (window,) = run.windows
    assert window.service_s == window.service_q97_s == pytest.approx(0.6)
    assert window.cpu_share == 1.0


def test_throttling_is_the_share_of_the_window(clock: Time) -> None:
    held = iter([3.0, 3.5, None])
    run = Run(clock, throttled_s=lambda: next(held))
    for _ in range(16):
        run.batch(0.25, 0.0)
    assert [window.throttled for window in run.windows] == [0.25, 0.0]


def test_what_fails_in_measuring_is_said_once_and_no_batch_is_lost(
    clock: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(clock)

    def fails(measures: Measures) -> None:
        raise LookupError("no such window")

    run.observer._on_window = fails
    for _ in range(20):
        run.batch(0.5, 0.0)
    said = capsys.readouterr().err
    assert said.count("the measuring of a loader has failed and is off") == 1 and "no such window" in said


@dataclass
class Sample:
    image: torch.Tensor
    label: int


class Graph:
    def __init__(self) -> None:
        self.edges = np.zeros(3)


def test_the_size_of_a_batch_of_anything() -> None:
    image = torch.zeros(4)
    assert bytes_of(image) == 16
    assert bytes_of({"a": image, "b": [image, (image, "text")], "c": None, "d": 3}) == 52
    assert bytes_of(Sample(image, 1)) == 16
    assert bytes_of(Graph()) == 24
    assert bytes_of([image] * 10_000) == 160_000
    endless: list[Any] = [image]
    endless.append(endless)
    assert 16 <= bytes_of(endless) < 1000


def test_what_of_a_batch_is_not_handed_over_in_shared_memory() -> None:
    image, scan = torch.zeros(4), np.zeros(3)
    assert bytes_of({"a": image, "b": [scan, Sample(image, 1)], "c": "text"}, piped=True) == 28
    assert tensors_of({"a": image, "b": [scan, Sample(image, 1)], "c": "text"}) == 2


def test_batches_that_a_worker_has_ready_are_not_counted_as_its_own_memory() -> None:
    windows: list[Measures] = []
    observer = Observer(windows.append, least_batches=2, window_s=0.0)

    def window_with(prefetch: int, worker_bytes: int) -> int:
        observer.starts(1, prefetch, None)
        observer.worker_bytes += worker_bytes
        for _ in range(3):
            observer.asked(None)
            observer.given(None, (np.zeros(10), torch.zeros(10)))
        return windows[-1].worker_bytes

    assert window_with(4, 1000) == 1000 - 4 * 80
    # What was measured of other workers, with more of them ready, is none of its business.
    assert window_with(2, 700) == 700 - 2 * 80
    assert window_with(64, 700) == 0
    assert windows[-1].tensors == 1


def test_memory_of_workers_that_have_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_memory, "_own_bytes", {1: 900, 2: 300, 3: 400}.__getitem__)
    memory = WorkerMemory()
    memory.watch((1, 2))
    assert memory.read() == 900
    memory.watch((2, 3))
    assert memory.read() == 400
    memory.watch(())
    assert memory.read() == 0


class Napping(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(Napping()[index] for index in range(12))


@pytest.mark.parametrize("dataset", [Napping(), Stream()])
def test_a_loader_that_is_read_as_it_is(dataset: Any) -> None:
    windows: list[Measures] = []
    loader: DataLoader[Any] = DataLoader(dataset, num_workers=1, prefetch_factor=3)
    observed = ObservedLoader(loader, on_window=windows.append, least_batches=3, window_s=0.0)
    epoch = observed.begin(loader.__iter__)
    assert loader.worker_init_fn is None
    next(epoch)
    observed.measure_memory()
    assert len([*epoch]) == 11
    window = windows[0]
    assert (window.workers, window.prefetch, window.batches) == (1, 3, 3)
    assert 0.01 <= window.service_s < 0.1
    assert window.cpu_share < 0.5
    assert window.worker_bytes > 100_000


def test_any_iterable_is_observed() -> None:
    windows: list[Measures] = []
    observed = ObservedLoader([1, 2, 3, 4, 5], on_window=windows.append, least_batches=3, window_s=0.0)
    assert [*observed.begin(lambda: iter([1, 2, 3, 4, 5]))] == [1, 2, 3, 4, 5]
    assert [window.batches for window in windows] == [3]


def test_times_of_workers_reach_the_windows_of_a_tuned_loader() -> None:
    windows: list[Measures] = []
    tuned = TunedLoader(
        DataLoader(Napping()), workers=1, prefetch=1, on_window=windows.append, say=print, least_batches=3, window_s=0.0
    )
    epoch = tuned.begin()
    for _ in range(6):
        next(epoch)
    tuned.resize(2, 1)
    assert len([*epoch]) == 6
    first = windows[0]
    assert (first.workers, first.prefetch, first.batches) == (1, 1, 3)
    assert 0.01 <= first.service_s <= first.service_q97_s < 0.1
    tuned.close()
