"""Measures a loader from where its batches are used."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import psutil

from lightning_ncclsafe.loaders.tuning.batch_sizes import bytes_of, tensors_of
from lightning_ncclsafe.loaders.tuning.stretches import Moment, Stretch
from lightning_ncclsafe.report.terminal import say_own_failure

# An epoch that lasts longer is measured, and decided on, in parts.
STRETCH_S = 120.0
# Steps of which the times are kept: of more, every second, every fourth, …
_MOST_STEPS = 1000
# A gap of so many usual ones is no step: that was a validation, a checkpoint.
_LONGEST_GAPS = 20.0
# Fewer say nothing of a step.
_LEAST_BATCHES = 3


class BatchSize(NamedTuple):
    """The largest batch seen so far.

    Attributes:
        size_bytes: Its size.
        tensors: How many tensors it has.
    """

    size_bytes: int = 0
    tensors: int = 0


class _Step(NamedTuple):
    gap_s: float
    cpu_s: float


class _Steps:
    """Some of all steps, evenly spread."""

    def __init__(self) -> None:
        self._kept: list[_Step] = []
        self._seen, self._every = 0, 1

    def add(self, step: _Step) -> None:
        self._seen += 1
        if self._seen % self._every == 0:
            self._kept.append(step)
        if len(self._kept) >= _MOST_STEPS:
            self._kept, self._every = self._kept[1::2], 2 * self._every

    def mean(self) -> _Step:
        most_s = _LONGEST_GAPS * median(step.gap_s for step in self._kept)
        steps = [step for step in self._kept if step.gap_s <= most_s]
        return _Step(fmean(step.gap_s for step in steps), fmean(step.cpu_s for step in steps))


@dataclass(slots=True)
class _Sums:
    """What was summed up since a stretch began."""

    began_at: float
    workers: int
    data_s: float = 0.0
    start_s: float = 0.0
    batches: int = 0


class Observer:
    """Measures one loader, on the thread that reads it; a few microseconds a batch.

    Args:
        on_stretch: Is given what was measured, on that thread.
        stretch_s: How long an epoch may last that is measured as a whole, seconds.
        epochs: How many epochs of the loader there were before.

    Attributes:
        moment: Where the loader is.
        size: The largest batch; looked at are the first of each epoch, the second, the fourth, … None before that.
    """

    def __init__(self, on_stretch: Callable[[Stretch], None], *, stretch_s: float = STRETCH_S, epochs: int = 0) -> None:
        self.moment = Moment(epochs)
        self.size: BatchSize | None = None
        self._on_stretch = on_stretch
        self._stretch_s = stretch_s
        self._process = psutil.Process()
        self._has_failed = False
        self._sums: _Sums | None = None
        self._steps = _Steps()
        self._of_epoch = 0
        self._asked_at = self._given_at = self._own_s = 0.0

    def begins(self, workers: int, took_s: float) -> None:
        """An epoch has begun.

        Args:
            workers: Workers that it has, or will have with its first batch.
            took_s: What that has taken so far, seconds.
        """
        self.moment = Moment(self.moment.epoch + 1)
        self._of_epoch = 0
        self._begin_stretch(workers)
        assert self._sums is not None
        self._sums.data_s = self._sums.start_s = took_s

    def asked(self) -> None:
        """The next batch is asked for."""
        self._asked_at = time.perf_counter()

    def given(self, batch: Any) -> bool:
        """It has been handed out.

        Returns:
            Whether a part of an epoch ends with it: see :meth:`goes_on`.
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
            self._steps.add(_Step(self._asked_at - self._given_at, own_s - self._own_s))
        sums.batches += 1
        self._of_epoch += 1
        if not self._of_epoch & (self._of_epoch - 1):
            size = self.size or BatchSize()
            self.size = BatchSize(max(size.size_bytes, bytes_of(batch)), max(size.tensors, tensors_of(batch)))
        # What is done with it, and what that takes in here, is the step's.
        self._given_at, self._own_s = given_at, own_s
        return given_at - sums.began_at >= self._stretch_s

    def goes_on(self, workers: int) -> None:
        """A part of the epoch has ended, and the next begins."""
        self._report()
        self.moment = Moment(self.moment.epoch, self.moment.part + 1)
        self._begin_stretch(workers)

    def ends(self, took_s: float = 0.0) -> None:
        """The epoch is over; its workers have taken so long to end, seconds."""
        if self._sums is not None:
            self._sums.data_s += took_s
            self._sums.start_s += took_s
            self._report()
        self._sums = None

    def _begin_stretch(self, workers: int) -> None:
        self._sums = _Sums(began_at=time.perf_counter(), workers=workers)
        self._steps = _Steps()

    def _report(self) -> None:
        sums = self._sums
        if self._has_failed or sums is None or sums.batches < _LEAST_BATCHES:
            return
        try:
            step, size = self._steps.mean(), self.size or BatchSize()
            self._on_stretch(
                Stretch(
                    epoch=self.moment.epoch,
                    part=self.moment.part,
                    workers=sums.workers,
                    batches=sums.batches,
                    gap_s=step.gap_s,
                    data_s=sums.data_s,
                    start_s=sums.start_s,
                    cpu_s=step.cpu_s,
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


class ObservedLoader:
    """Measures a loader that is read as it is.

    Args:
        loader: The loader.
        on_stretch: Is given what was measured, on the thread that reads.
        stretch_s: How long an epoch may last that is measured as a whole, seconds.
        epochs: How many epochs of the loader there were before.
    """

    def __init__(
        self, loader: Any, *, on_stretch: Callable[[Stretch], None], stretch_s: float = STRETCH_S, epochs: int = 0
    ) -> None:
        self._loader = loader
        self.observer = Observer(on_stretch, stretch_s=stretch_s, epochs=epochs)

    def begin(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begins an epoch.

        Args:
            begin: Begins the loader's own iteration.
        """
        self.observer.ends()
        began_at = time.perf_counter()
        iterator = begin()
        self.observer.begins(self.workers, time.perf_counter() - began_at)
        return _Observed(iterator, self)

    @property
    def workers(self) -> int:
        """Workers that it has."""
        return int(getattr(self._loader, "num_workers", 0))


class _Observed:
    """An iterator over an iterator."""

    def __init__(self, iterator: Iterator[Any], loader: ObservedLoader) -> None:
        self._iterator = iterator
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        observer = self._loader.observer
        observer.asked()
        batch = next(self._iterator)
        if observer.given(batch):
            observer.goes_on(self._loader.workers)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type] # as long as it is
