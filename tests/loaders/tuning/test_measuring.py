"""What is measured of a loader: steps, what they wait for, what workers take to start; and how large batches are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe.loaders.tuning import measuring
from lightning_ncclsafe.loaders.tuning.measuring import (
    BatchSize,
    Interval,
    Measurement,
    ObservedIterator,
    Observer,
    size_of,
)


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.cpu_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    return clock


class Run:
    def __init__(self, clock: Clock, **options: Any) -> None:
        self.clock = clock
        self.found: list[Measurement] = []
        self.observer = Observer(self.found.append, **options)

    def step(self, wait_s: float, gap_s: float, cpu_s: float = 0.0, batch: Any = b"") -> bool:
        self.observer.asked()
        self.clock.now_s += wait_s
        ends = self.observer.given(batch)
        self.clock.now_s += gap_s
        self.clock.cpu_s += cpu_s
        return ends


def test_an_epoch_includes_starting_and_ending_its_workers(clock: Clock) -> None:
    run = Run(clock)
    run.observer.begins(2, took_s=0.25)
    run.step(1.0, 0.5, cpu_s=0.125, batch=torch.zeros(8))
    for _ in range(4):
        run.step(0.125, 0.5, cpu_s=0.125)
    assert run.found == []
    clock.now_s += 50  # a validation
    run.observer.ends(took_s=0.5)
    (found,) = run.found
    assert (found.interval, found.workers, found.batches) == (Interval(1), 2, 5)
    assert found.gap_s == 0.5 and found.cpu_s == 0.125
    assert found.data_s == 0.25 + 1.0 + 4 * 0.125 + 0.5
    assert found.start_s == 0.25 + 1.0 + 0.5
    assert found.step_s == 0.5 + 2.25 / 5 and found.wait_s == 0.5 / 5
    assert (found.batch_bytes, found.tensors) == (32, 1) and found.process_bytes > 10**6


def test_a_checkpoint_between_steps_is_not_a_step(clock: Clock) -> None:
    run = Run(clock)
    run.observer.begins(0, took_s=0.0)
    for _ in range(20):
        run.step(0.0, 0.01)
    run.step(0.0, 30.0, cpu_s=20.0)
    for _ in range(20):
        run.step(0.0, 0.01)
    run.observer.ends()
    assert run.found[0].gap_s == pytest.approx(0.01) and run.found[0].cpu_s == 0.0


def test_an_epoch_of_minutes_is_measured_in_parts(clock: Clock) -> None:
    run = Run(clock, epochs=7)
    run.observer.begins(1, took_s=1.0)
    ended = 0
    for _ in range(1000):
        if run.step(0.1, 0.4):
            run.observer.begin_part(2)
            ended += 1
    assert ended == 4
    assert [measurement.interval for measurement in run.found] == [
        Interval(8),
        Interval(8, 1),
        Interval(8, 2),
        Interval(8, 3),
    ]
    assert [measurement.workers for measurement in run.found] == [1, 2, 2, 2]
    assert run.found[0].start_s == pytest.approx(1.1) and run.found[1].start_s == 0.0
    assert run.found[1].gap_s == pytest.approx(0.4) and run.found[1].wait_s == pytest.approx(0.1)


def test_the_steps_of_a_long_epoch_take_little_memory(clock: Clock) -> None:
    run = Run(clock)
    run.observer.begins(1, took_s=0.0)
    for index in range(100_000):
        run.step(0.0, 0.001 + 1e-9 * index)
    assert run.observer._sums is not None and len(run.observer._sums.steps) <= 1000
    run.observer.ends()
    assert run.found[0].gap_s == pytest.approx(0.00105, rel=0.01)


def test_two_batches_are_too_few_to_measure(clock: Clock) -> None:
    run = Run(clock)
    for batches in (0, 1, 2):
        run.observer.begins(1, took_s=0.0)
        for _ in range(batches):
            run.step(0.1, 0.1)
        run.observer.ends()
    assert run.found == []


def test_batch_sizes_are_sampled_less_and_less_often(clock: Clock) -> None:
    run = Run(clock)
    run.observer.begins(1, took_s=0.0)
    assert run.observer.size is None
    sizes = []
    for number in range(1, 10):
        run.step(0.0, 0.0, batch=torch.zeros(number))
        assert run.observer.size is not None
        sizes.append(run.observer.size.size_bytes // 4)
    assert sizes == [1, 2, 2, 4, 4, 4, 4, 8, 8]


def test_a_failure_is_printed_once_and_no_batch_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "size_of", lambda batch: 1 / 0)
    measurements: list[Measurement] = []
    loader = DataLoader(torch.zeros(20))  # type: ignore[arg-type]
    observer = Observer(measurements.append)
    for _ in range(3):
        assert len([*ObservedIterator(loader, loader.__iter__, observer)]) == 20
    assert measurements == [] and observer.size == BatchSize()
    assert capsys.readouterr().err.count("the measuring of a loader failed") == 1


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_observing_does_not_change_the_batches() -> None:
    measurements: list[Measurement] = []
    loader = DataLoader(Stream(), batch_size=None)
    observer = Observer(measurements.append)
    for _ in range(2):
        iterator = ObservedIterator(loader, loader.__iter__, observer)
        assert iter(iterator) is iterator
        assert [*iterator] == list(range(10))
    assert [(measurement.interval, measurement.workers, measurement.batches) for measurement in measurements] == [
        (Interval(1), 0, 10)
    ]


@dataclass
class Sample:
    image: torch.Tensor
    label: int


class Graph:
    def __init__(self) -> None:
        self.edges = np.zeros(3)


def test_the_size_of_any_batch_is_measured() -> None:
    image, scan = torch.zeros(4), np.zeros(3)
    assert size_of(image) == BatchSize(16, 1)
    assert size_of({"a": image, "b": [image, (image, "text")], "c": None, "d": 3}) == BatchSize(52, 3)
    assert size_of({"a": image, "b": [scan, Sample(image, 1)], "c": "text"}) == BatchSize(60, 2)
    assert size_of(Sample(image, 1)) == BatchSize(16, 1)
    assert size_of(Graph()) == BatchSize(24)
    assert size_of([image] * 10_000) == BatchSize(160_000, 10_000)
    endless: list[Any] = [image]
    endless.append(endless)
    assert 16 <= size_of(endless).size_bytes < 1000
