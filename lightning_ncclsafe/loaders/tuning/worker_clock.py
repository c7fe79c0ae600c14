"""Times how long the worker processes of a loader take for a batch, from within."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_ncclsafe import _torch

# The last batches of each worker that are kept: more than one makes in a window.
RING = 64
_COLUMNS = 1 + 2 * RING


class Service(NamedTuple):
    """How long one batch took: on the clock and on processors, seconds."""

    wall_s: float
    cpu_s: float


class WorkerClock:
    """Stands for the ``worker_init_fn`` of a loader: calls the user's own, then times what the worker does.

    Each worker writes to a row of its own in shared memory, and whoever made the clock reads it; nobody waits. A row
    is how many batches there were, then a ring of their times. A batch that is written while it is read may be taken
    for the one before it; that is a few in a thousand of an average.

    Args:
        workers: How many workers there will be.
        worker_init_fn: The user's own, or None.

    Attributes:
        slowest_s: How long the slowest batch took that was read so far, seconds.

    Raises:
        RuntimeError: If there is no shared memory.
    """

    def __init__(self, workers: int, worker_init_fn: Callable[[int], Any] | None) -> None:
        self.slowest_s = 0.0
        self._worker_init_fn = worker_init_fn
        self._rows = _torch.shared_floats(workers, _COLUMNS)
        self._seen = [0] * workers

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker process, before its first batch."""
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
        # Whatever may be wrong with it, the data matters more than its times.
        with suppress(Exception):
            _torch.wrap_fetch(_Timed(self._rows.numpy()[worker_id]))

    def take(self) -> list[Service]:
        """What there is since the last time, at most the last 64 batches of each worker."""
        rows = self._rows.numpy()
        found = [service for worker in range(len(self._seen)) for service in self._new_of(worker, rows[worker])]
        self.slowest_s = max([self.slowest_s, *(service.wall_s for service in found)])
        return found

    def _new_of(self, worker: int, row: Any) -> list[Service]:
        seen, self._seen[worker] = self._seen[worker], int(row[0])
        numbers = range(max(seen, self._seen[worker] - RING), self._seen[worker])
        slots = (1 + 2 * (number % RING) for number in numbers)
        return [Service(float(row[slot]), float(row[slot + 1])) for slot in slots]


class _Timed:
    """Calls a function and writes down how long that took, in the worker.

    The processor time is the whole process's, not the thread's: what a decoder does on threads of its own occupies
    cores as well, and so does the thread that puts batches into the queue. Nothing else runs in a worker.
    """

    def __init__(self, row: Any) -> None:
        self._row = row
        self._is_inside = False

    def __call__(self, fetch: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_inside:  # a dataset that reads a loader of its own
            return fetch(*arguments)
        self._is_inside = True
        try:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            batch = fetch(*arguments)
            self._write(time.perf_counter() - wall_s, time.process_time() - cpu_s)
            return batch
        finally:
            self._is_inside = False

    def _write(self, wall_s: float, cpu_s: float) -> None:
        row = self._row
        count = int(row[0])
        slot = 1 + 2 * (count % RING)
        row[slot], row[slot + 1] = wall_s, cpu_s
        row[0] = count + 1
