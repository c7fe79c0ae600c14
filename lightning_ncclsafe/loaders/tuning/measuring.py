"""Measures a loader where its batches are used: the only data that the tuner decides by."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, median
from typing import Any, NamedTuple

import psutil

from lightning_ncclsafe.report.terminal import say_own_failure

# Enough for any collated batch; for any other, these items represent the rest.
_MOST_VALUES = 256
_MOST_OF_ONE = 64
_DEEPEST = 6
# A longer epoch is measured, and decided on, in parts.
INTERVAL_S = 120.0
# Steps whose times are kept: of more steps every second, every fourth, …
_MOST_STEPS = 1000
# A gap of this many usual ones is not a step but a validation or a checkpoint.
_LONGEST_GAPS = 20.0
# Fewer steps do not show how long a step takes.
_LEAST_BATCHES = 3


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """An epoch of a loader, or a part of one that lasts for minutes; the same on all ranks.

    Attributes:
        epoch: Counts the epochs of the loader, from 1.
        part: Counts the parts of a long epoch, from 0.
    """

    epoch: int
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one rank measures of one loader over an interval.

    Attributes:
        interval: The interval.
        workers: Its workers.
        batches: Batches that it yielded.
        gap_s: Mean time from getting a batch to asking for the next, seconds; gaps with a validation or a checkpoint
            are left out.
        data_s: Time that the training thread spends in the loader, seconds: starting workers, waiting for batches,
            receiving them, and ending workers.
        start_s: Of that, the time until the first batch and that of ending the workers; 0 if they were there before.
        cpu_s: Mean processor time of this process for a step and its batch, without worker processes, seconds.
        batch_bytes: Size of the largest batch seen.
        tensors: Most tensors of a batch seen.
        process_bytes: Memory of this process: a worker forked from it may use as much in the end.
        seeded: Whether the run, or the loader, has a seed.
        persists: Whether its workers stay from one epoch to the next.
    """

    interval: Interval
    workers: int
    batches: int
    gap_s: float
    data_s: float
    start_s: float = 0.0
    cpu_s: float = 0.0
    batch_bytes: int = 0
    tensors: int = 0
    process_bytes: int = 0
    seeded: bool = False
    persists: bool = False

    @property
    def step_s(self) -> float:
        """What a step costs, including all that the loader costs; seconds."""
        return self.gap_s + self.data_s / self.batches

    @property
    def wait_s(self) -> float:
        """How long a step waits for its batch once workers have started; seconds."""
        return (self.data_s - self.start_s) / self.batches


def slowest_of(ranks: Sequence[Measurement]) -> Measurement | None:
    """One interval of all ranks, as measured by the rank whose loader is slowest; None if workers differ.

    Processor time and memory are the largest of all ranks. The others wait for that rank in a collective, which is
    part of their gaps, so that steps take equally long on all ranks.
    """
    if len({rank.workers for rank in ranks}) > 1:
        return None
    return replace(
        max(ranks, key=lambda rank: rank.data_s / rank.batches),
        batches=min(rank.batches for rank in ranks),
        cpu_s=max(rank.cpu_s for rank in ranks),
        batch_bytes=max(rank.batch_bytes for rank in ranks),
        tensors=max(rank.tensors for rank in ranks),
        process_bytes=max(rank.process_bytes for rank in ranks),
        seeded=any(rank.seeded for rank in ranks),
        persists=any(rank.persists for rank in ranks),
    )


class BatchSize(NamedTuple):
    """How large a batch is, or the largest of several.

    Attributes:
        size_bytes: Bytes of its tensors, arrays and strings.
        tensors: How many tensors it has.
    """

    size_bytes: int = 0
    tensors: int = 0


def size_of(batch: Any) -> BatchSize:
    """The size of a batch, which may be any nesting of containers, dataclasses and objects.

    The first 64 items of a long list represent the others. About 256 values are read, which takes about 0.2 ms.
    """
    left = _MOST_VALUES

    def sums(value: Any, depth: int) -> tuple[float, float]:
        nonlocal left
        left -= 1
        # A class with dynamic attributes may fail in any way.
        with suppress(Exception):
            size = getattr(value, "nbytes", None)
            if isinstance(size, int):
                return size, hasattr(value, "share_memory_")
            if isinstance(value, (str, bytes, bytearray)):
                return len(value), 0
            parts = _parts_of(value)
            if depth and parts and left > 0:
                found = []
                for part in islice(parts.values() if isinstance(parts, Mapping) else parts, _MOST_OF_ONE):
                    if left <= 0:
                        break
                    found.append(sums(part, depth - 1))
                size_bytes, tensors = (sum(each) * len(parts) / len(found) for each in zip(*found, strict=True))
                return size_bytes, tensors
        return 0, 0

    size_bytes, tensors = sums(batch, _DEEPEST)
    return BatchSize(int(size_bytes), int(tensors))


def _parts_of(value: Any) -> Any:
    if isinstance(value, (Mapping, list, tuple, Set)):
        return value
    slots = {name: getattr(value, name, None) for name in getattr(type(value), "__dataclass_fields__", ())}
    return slots or getattr(value, "__dict__", None)


class _Sums:
    """What is measured since an interval began: sums, and a sample of all steps, evenly spread."""

    def __init__(self, workers: int) -> None:
        self.began_at = time.perf_counter()
        self.workers = workers
        self.data_s = self.start_s = 0.0
        self.batches = 0
        self.steps: list[tuple[float, float]] = []
        self._seen, self._every = 0, 1

    def add_step(self, gap_s: float, cpu_s: float) -> None:
        self._seen += 1
        if self._seen % self._every == 0:
            self.steps.append((gap_s, cpu_s))
        if len(self.steps) >= _MOST_STEPS:
            self.steps, self._every = self.steps[1::2], 2 * self._every

    def mean_step(self) -> tuple[float, float]:
        """Mean gap and processor time of a step; a gap with a validation or a checkpoint is left out."""
        most_s = _LONGEST_GAPS * median(gap_s for gap_s, _ in self.steps)
        gaps_s, cpus_s = zip(*(step for step in self.steps if step[0] <= most_s), strict=True)
        return fmean(gaps_s), fmean(cpus_s)


class Observer:
    """Measures one loader, on the thread that reads it; a few microseconds a batch.

    Args:
        on_measured: Called on that thread with each measurement.
        epochs: Number of earlier epochs of the loader.

    Attributes:
        interval: The current interval.
        size: The largest of the first, second, fourth, … batches of each epoch; None before the first.
    """

    def __init__(self, on_measured: Callable[[Measurement], None], *, epochs: int = 0) -> None:
        self.interval = Interval(epochs)
        self.size: BatchSize | None = None
        self._on_measured = on_measured
        self._process = psutil.Process()
        self._has_failed = False
        self._sums: _Sums | None = None
        self._of_epoch = 0
        self._asked_at = self._given_at = self._own_s = 0.0

    def begins(self, workers: int, took_s: float) -> None:
        """An epoch has begun.

        Args:
            workers: Workers that it has, or will have with its first batch.
            took_s: How long beginning it has taken so far, seconds.
        """
        self.interval = Interval(self.interval.epoch + 1)
        self._of_epoch = 0
        self._sums = _Sums(workers)
        self._sums.data_s = self._sums.start_s = took_s

    def asked(self) -> None:
        """Notes that the next batch is asked for."""
        self._asked_at = time.perf_counter()

    def given(self, batch: Any) -> bool:
        """Notes that it is handed out.

        Returns:
            Whether the interval ends with it: see :meth:`begin_part`.
        """
        sums = self._sums
        if self._has_failed or sums is None:
            return False
        try:
            return self._given(sums, batch)
        except Exception as error:
            self._fail(error)
            return False

    def _given(self, sums: _Sums, batch: Any) -> bool:
        given_at, own_s = time.perf_counter(), time.process_time()
        wait_s = given_at - self._asked_at
        sums.data_s += wait_s
        if self._of_epoch == 0:
            sums.start_s += wait_s
        else:
            sums.add_step(self._asked_at - self._given_at, own_s - self._own_s)
        sums.batches += 1
        self._of_epoch += 1
        if not self._of_epoch & (self._of_epoch - 1):
            self.size = BatchSize(*map(max, self.size or BatchSize(), size_of(batch)))
        # The time from here on, including what this method takes, belongs to the step.
        self._given_at, self._own_s = given_at, own_s
        return given_at - sums.began_at >= INTERVAL_S

    def begin_part(self, workers: int) -> None:
        """Ends a part of the epoch and begins the next."""
        self._report()
        self.interval = Interval(self.interval.epoch, self.interval.part + 1)
        self._sums = _Sums(workers)

    def ends(self, took_s: float = 0.0) -> None:
        """Ends the epoch; its workers took ``took_s`` to end."""
        if self._sums is not None:
            self._sums.data_s += took_s
            self._sums.start_s += took_s
            self._report()
        self._sums = None

    def _report(self) -> None:
        sums = self._sums
        if self._has_failed or sums is None or sums.batches < _LEAST_BATCHES:
            return
        try:
            (gap_s, cpu_s), size = sums.mean_step(), self.size or BatchSize()
            self._on_measured(
                Measurement(
                    interval=self.interval,
                    workers=sums.workers,
                    batches=sums.batches,
                    gap_s=gap_s,
                    data_s=sums.data_s,
                    start_s=sums.start_s,
                    cpu_s=cpu_s,
                    batch_bytes=size.size_bytes,
                    tensors=size.tensors,
                    process_bytes=int(self._process.memory_info().rss),
                )
            )
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self.size = self.size or BatchSize()
        say_own_failure(error, what="the measuring of a loader")


class ObservedIterator:
    """An epoch of a loader that is read unchanged, and measured.

    Args:
        begin: Begins the loader's own iteration.
    """

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]], observer: Observer) -> None:
        observer.ends()
        began_at = time.perf_counter()
        self._loader = loader
        self._iterator = begin()
        self._observer = observer
        observer.begins(loader.num_workers, time.perf_counter() - began_at)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._observer.asked()
        batch = next(self._iterator)
        if self._observer.given(batch):
            self._observer.begin_part(self._loader.num_workers)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type] # as long as it is
