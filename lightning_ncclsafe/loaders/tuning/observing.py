"""Measures a loader from where its batches are used, and makes windows of :class:`Measures` of it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ref

from lightning_ncclsafe import _torch
from lightning_ncclsafe.loaders.tuning.batch_sizes import bytes_of, tensors_of
from lightning_ncclsafe.loaders.tuning.measures import Measures
from lightning_ncclsafe.loaders.tuning.windows import GAPS, Window, target_gap_s
from lightning_ncclsafe.loaders.tuning.worker_clock import Service, WorkerClock
from lightning_ncclsafe.loaders.tuning.worker_memory import WorkerMemory
from lightning_ncclsafe.reporter import say_own_failure

# tf.data's ``ComputeTargetTimeNsec`` takes no gap into account that is longer: that was a validation, a checkpoint.
_LONGEST_GAP_S = 10.0
# Where a look into the queue is not possible: a batch that is ready takes about 0.9 ms (torch 2.13, measured).
_READY_WITHIN_S = 0.001
_HANDED_OVER_WITHIN_S = 0.002


class Observer:
    """Measures one loader, on the thread that reads it; some 10 µs a batch.

    Args:
        on_window: Is given the measures of each window.
        least_batches: Batches of a window.
        window_s: Seconds of a window. One of twice that needs only three batches.
        throttled_s: Seconds for which the control group's quota has held this rank's processes so far; None if unknown.

    Attributes:
        worker_bytes: Memory that a worker has for itself, as somebody else has measured it.
    """

    def __init__(
        self,
        on_window: Callable[[Measures], None],
        *,
        least_batches: int = 8,
        window_s: float = 1.0,
        throttled_s: Callable[[], float | None] | None = None,
    ) -> None:
        self.worker_bytes = 0
        self._on_window: Callable[[Measures], None] | None = on_window
        self._least_batches = least_batches
        self._window_s = window_s
        self._throttled_s = throttled_s or _unknown
        self._piped_bytes = 0
        self._most_tensors = 0
        self._setting = (-1, -1)
        self._clock: ref[WorkerClock] | None = None
        self._largest_batch = 0
        self._reset()

    def starts(self, workers: int, prefetch: int, clock: WorkerClock | None) -> None:
        """Workers have been started, or an epoch: the first batch says nothing. Goes on with a window if it can."""
        if (workers, prefetch) == self._setting:
            self._epoch_ended()
        else:
            self._setting = workers, prefetch
            self.worker_bytes = 0  # of others
            self._reset()
        # It goes with its workers, and its memory with it.
        self._clock = ref(clock) if clock is not None else None
        self._is_first = True

    def ends(self) -> None:
        """Workers are about to be ended."""
        clock = self._clock() if self._clock is not None else None
        self._window.services += clock.take() if clock is not None else []

    def _epoch_ended(self) -> None:
        """Of epochs that are short beside what they take to begin, a window would have a hundred."""
        self.ends()
        is_old = time.perf_counter() - self._began_at >= self._window_s
        if is_old and self._window.batches >= self._least_batches and self._on_window is not None:
            try:
                self._end_window(self._window)
            except Exception as error:
                self._on_window = None
                say_own_failure(error, what="the measuring of a loader")

    def _reset(self) -> None:
        self._began_at = time.perf_counter()
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._window = Window()
        self._services: list[Service] = []
        self._is_first = True
        self._given_at = self._asked_at = 0.0
        self._cpu_s = self._own_s = self._throttled_before_s = 0.0
        self._ready: _torch.ReadyBatches | None = None

    def asked(self, iterator: Any) -> None:
        """The next batch is asked for."""
        if self._setting[0]:
            self._ready = _torch.ready_batches(iterator)
        else:
            self._cpu_s = time.thread_time()
        self._asked_at = time.perf_counter()

    def given(self, iterator: Any, batch: Any) -> None:
        """It has been handed out."""
        if self._on_window is None:
            return
        try:
            self._given(iterator, batch)
        except Exception as error:
            self._on_window = None
            say_own_failure(error, what="the measuring of a loader")

    def _given(self, iterator: Any, batch: Any) -> None:
        given_at, own_s = time.perf_counter(), time.process_time()
        gap_s, used_s = self._asked_at - self._given_at, own_s - self._own_s
        self._given_at, self._own_s = given_at, own_s
        if self._is_first or gap_s > _LONGEST_GAP_S:
            self._is_first = False
            self._throttled_before_s = self._throttled_s() or 0.0
            return
        window, wait_s = self._window, given_at - self._asked_at
        self._gaps.append(gap_s)
        window.add(gap_s, wait_s, used_s, starved=not self._was_ready(iterator, wait_s))
        if not self._setting[0]:
            window.services.append(Service(wait_s, time.thread_time() - self._cpu_s))
        if window.batches == 1:
            self._largest_batch = max(self._largest_batch, bytes_of(batch))
            self._most_tensors = max(self._most_tensors, tensors_of(batch))
            self._piped_bytes = max(self._piped_bytes, bytes_of(batch, piped=True))
        if window.is_full(self._least_batches, self._window_s):
            # What is done with it counts as the step's time, not as the loader's.
            self._end_window(window)

    def _was_ready(self, iterator: Any, wait_s: float) -> bool:
        """Whether the batch was there when it was asked for, and not only others that were due after it."""
        if not self._setting[0]:
            return False
        before, after = self._ready, _torch.ready_batches(iterator)
        if before is None or after is None:
            return wait_s < _READY_WITHIN_S
        taken = after.received - before.received + 1
        # A worker that computes in Python is slow to hand over what it has ready: then it is not there either.
        return (before.is_due or taken <= before.queued) and wait_s < _HANDED_OVER_WITHIN_S

    def _end_window(self, window: Window) -> None:
        self.ends()
        self._window, self._began_at = Window(), time.perf_counter()
        # None of a window of slow batches: what was before it still holds.
        self._services = window.services or self._services
        now_s = self._throttled_s() or 0.0
        throttled_s, self._throttled_before_s = now_s - self._throttled_before_s, now_s
        assert self._on_window is not None
        self._on_window(
            window.measures(
                self._setting,
                self._services,
                gap_s=target_gap_s(self._gaps),
                batch_bytes=self._largest_batch,
                tensors=self._most_tensors,
                # Those that it has ready are counted as batches.
                worker_bytes=max(self.worker_bytes - self._setting[1] * self._piped_bytes, 0),
                throttled_s=throttled_s,
            )
        )


def _unknown() -> float | None:
    return None


class ObservedLoader:
    """Measures a loader that is read as it is.

    Args:
        loader: The loader.
        on_window: Is given what was measured, now and then, on the thread that reads.
        least_batches: Batches that are measured before ``on_window`` is called.
        window_s: Seconds that are measured before it is called.
        throttled_s: Seconds for which the control group's quota has held this rank's processes so far; None if unknown.
    """

    def __init__(
        self,
        loader: Any,
        *,
        on_window: Callable[[Measures], None],
        least_batches: int = 8,
        window_s: float = 1.0,
        throttled_s: Callable[[], float | None] | None = None,
    ) -> None:
        self._loader = loader
        self._clock: WorkerClock | None = None
        self._memory = WorkerMemory()
        self._observer = Observer(on_window, least_batches=least_batches, window_s=window_s, throttled_s=throttled_s)

    def begin(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begins an epoch.

        Args:
            begin: Begins the loader's own iteration.
        """
        workers = int(getattr(self._loader, "num_workers", 0))
        prefetch = int(getattr(self._loader, "prefetch_factor", 0) or 0)
        with self._timed(workers):
            iterator = begin()
        self._memory.watch(_torch.worker_pids(iterator))
        self._observer.starts(workers, prefetch, self._clock)
        return _Observed(iterator, self._observer)

    @contextmanager
    def _timed(self, workers: int) -> Iterator[None]:
        """Workers that are started meanwhile are timed; the loader is what it was before any batch is read."""
        loader = self._loader
        if not workers or not _torch.is_dataloader(loader) or loader._iterator is not None:
            yield
            return
        own, self._clock = loader.worker_init_fn, None
        with suppress(Exception):
            loader.worker_init_fn = self._clock = WorkerClock(workers, own)
        try:
            yield
        finally:
            loader.worker_init_fn = own

    def measure_memory(self) -> int:
        """Reads how much memory a worker has for itself, bytes; see :meth:`TunedLoader.measure_memory`."""
        self._observer.worker_bytes = self._memory.read()
        return self._observer.worker_bytes


class _Observed:
    """An iterator over an iterator."""

    def __init__(self, iterator: Iterator[Any], observer: Observer) -> None:
        self._iterator = iterator
        self._observer = observer

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._observer.asked(self._iterator)
        batch = next(self._iterator)
        self._observer.given(self._iterator, batch)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type] # as long as it is
