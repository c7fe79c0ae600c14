"""Changes how many workers a live loader has: no sample is lost, repeated or moved.

The random streams of the training stay the same: samplers begin when and as often as with torch, and one number is
drawn for each epoch where torch draws one. Two things depend on the number of workers as such, with stock torch as
well: what ``Dataset.__getitem__`` draws, and, when an epoch is left early, how far ahead a sampler is that draws
numbers for each batch or at its end (as ``RandomSampler(generator=…)`` does). Fewer batches ahead change nothing: each
is made by the same worker, and samplers are asked when torch would ask them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from lightning_ncclsafe._torch import loading
from lightning_ncclsafe.loaders.tuning.eligibility import forks, unforkable_dataset
from lightning_ncclsafe.loaders.tuning.measuring import BatchSize, Interval, Observer
from lightning_ncclsafe.loaders.tuning.worker_pool import Deadlines, EpochIndices, PoolSampler, WorkerPool

# Any odd number with well mixed bits, so that the seeds of consecutive pools have nothing in common.
_SEED_STEP = 0x9E3779B97F4A7C15


class ResizableLoader:
    """Reads a loader with workers that can be changed at any time, on the thread that reads it.

    Args:
        loader: The user's ``DataLoader``, one that :func:`is_resizable` and :func:`is_safe` accept; not changed.
        observer: Measures it.
        user_workers: The user's ``num_workers``, as far as there is room: what it begins with.
        say: Prints why it goes back to fewer workers.
        workers_at: Number of workers for an interval, asked when it begins; None for no change.
        most_ahead: How many batches may be ready or in the making, given the largest so far; None for as many as are
            set. Before the first batch, there is one for each worker.

    Attributes:
        workers: Number of workers in force.
        frozen: Whether it takes no more settings.
    """

    def __init__(
        self,
        loader: Any,
        observer: Observer,
        *,
        user_workers: int,
        say: Callable[[str], None],
        workers_at: Callable[[Interval], int | None] = lambda _: None,
        most_ahead: Callable[[BatchSize], int | None] = lambda _: None,
    ) -> None:
        self.workers = user_workers
        self.frozen = False
        self.observer = observer
        self._loader = loader
        self._user_workers = user_workers
        self._target = user_workers
        self._say = say
        self._workers_at = workers_at
        self._most_ahead = most_ahead
        self._persists = bool(loader.persistent_workers) and user_workers > 0
        self._deadlines = Deadlines(forks=forks(loader))
        self._epochs: WeakSet[Epoch] = WeakSet()
        self._kept: WorkerPool | None = None
        self._leaving: list[WorkerPool] = []
        self._has_begun = False
        self._seed = 0
        self._started = 0

    def begin(self) -> "Epoch":
        """Begins an epoch, as ``iter(loader)`` does.

        Workers of an epoch that was not read to its end are ended; if it is read on, it gets new ones. As with torch,
        they end while those of the next epoch start.
        """
        began_at = time.perf_counter()
        for epoch in [*self._epochs]:
            epoch.park()
        asked_at = time.perf_counter()
        try:
            self._look_up(Interval(self.observer.interval.epoch + 1))
            epoch = self._begin()
        finally:
            started_at = time.perf_counter()
            self._end_leaving()
            # The wait for workers to end belongs to the last epoch.
            self.observer.ends(asked_at - began_at + time.perf_counter() - started_at)
        self.observer.begins(self._target, started_at - asked_at)
        return epoch

    def _begin(self) -> "Epoch":
        # Torch resets persistent workers without drawing a number.
        draws = not (self._has_begun and self._persists)
        self._has_begun = True
        # Torch begins the sampler once for each iterator, and once more for each epoch of worker processes.
        loader = self._loader
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        indices = EpochIndices(sampler, begins=2 if self._user_workers and draws else 1)
        epoch = Epoch(self, indices)
        self._epochs.add(epoch)
        if self._user_workers:
            epoch.start(draws=draws)
            indices.begin_fully()
            # By now, torch has given workers the first indices, and many samplers draw a seed with the first one.
            indices.is_over()
        else:
            indices.begin()
            self._seed = loading.draw_base_seed(loader)
        return epoch

    def resize(self, workers: int) -> None:
        """Sets how many workers to use.

        The batches that the present workers have begun are handed out first. Once frozen, nothing happens.
        """
        if not self.frozen:
            self._set(workers)

    def _set(self, workers: int) -> None:
        self._target = workers
        for epoch in self._epochs:
            if epoch.pool is not None and epoch.pool.workers != workers:
                epoch.pool.sampler.shut()

    def _freeze(self, workers: int) -> None:
        self.frozen = True
        self._set(workers)

    def _look_up(self, interval: Interval) -> None:
        workers = self._workers_at(interval)
        if workers is not None:
            self.resize(workers)

    def close(self) -> None:
        """Ends all workers. An epoch that is read on has the user's."""
        self._freeze(self._user_workers)
        for epoch in [*self._epochs]:
            epoch.park()
        self._end_leaving()
        if self._kept is not None:
            self.end(self._kept)

    # What epochs call.

    def given(self, pool: WorkerPool, batch: Any) -> None:
        """Notes that it is handed out."""
        observer = self.observer
        before = observer.size
        ends = observer.given(batch)
        if observer.size != before:
            pool.limit(self._limit_of(pool.workers))
        if ends:
            self._look_up(Interval(observer.interval.epoch, observer.interval.part + 1))
            observer.begin_part(self._target)

    def _limit_of(self, workers: int) -> int | None:
        size = self.observer.size
        return workers if size is None else self._most_ahead(size)

    def end(self, pool: WorkerPool) -> None:
        """Ends workers."""
        if pool is self._kept:
            self._kept = None
        pool.end()

    def release(self, pool: WorkerPool) -> None:
        """Takes workers back at the end of an epoch; the next epoch may use them."""
        if pool is not self._kept:
            pool.end()

    def leave(self, pool: WorkerPool) -> None:
        """Takes workers back from an epoch that is not read on for now: as `release`, without waiting for their end."""
        if pool is not self._kept:
            pool.ask_to_end()
            self._leaving.append(pool)

    def _end_leaving(self) -> None:
        while self._leaving:
            self._leaving.pop().end()

    def pool(self, indices: EpochIndices, *, draws: bool) -> WorkerPool:
        """As many workers as are wanted, for the rest of an epoch.

        Args:
            draws: Whether their seed is drawn, as torch does when an epoch begins.
        """
        # Another epoch may be read at the same time, as in zip(loader, loader): it keeps its workers.
        kept_is_free = self._kept is None or all(epoch.pool is not self._kept for epoch in self._epochs)
        kept = self._kept if kept_is_free else None
        if kept is None or not self._renewed(kept, indices):
            kept = self._start(indices, draws=draws)
        if self._persists and kept.pids and kept_is_free:
            self._kept = kept
        self.workers = kept.workers
        return kept

    def _renewed(self, kept: WorkerPool, indices: EpochIndices) -> bool:
        if kept.workers == self._target:
            try:
                kept.renew(indices)
                return True
            except Exception as error:
                if indices.has_failed or not self.falls_back(kept, error):
                    raise
        self.end(kept)
        return False

    def falls_back(self, pool: WorkerPool, error: Exception) -> bool:
        """Whether to continue without the workers that failed, as the user did not ask for them."""
        if pool.is_extra:
            self._step_down(pool.workers, self._user_workers, error)
        return pool.is_extra

    def _start(self, indices: EpochIndices, *, draws: bool) -> WorkerPool:
        # Again: the dataset may have opened files in this process with its first samples.
        if self._target > self._user_workers and (what := unforkable_dataset(self._loader)):
            self._go_back(what, self._user_workers)
        while True:
            workers = self._target
            try:
                return self._pool_of(workers, indices, draws=draws)
            except Exception as error:
                # Torch would start at least as many.
                is_users = draws and workers <= self._user_workers
                if indices.has_failed or is_users or not workers:
                    raise
                # As many as are known to work, or none, which cannot fail.
                known = (self.workers, self._user_workers)
                self._step_down(workers, max((fewer for fewer in known if fewer < workers), default=0), error)
            draws = False

    def _pool_of(self, workers: int, indices: EpochIndices, *, draws: bool) -> WorkerPool:
        self._started += 1
        pool = WorkerPool(
            self._loader,
            workers,
            PoolSampler(indices, self._limit_of(workers) if workers else None),
            seed=None if draws else (self._seed + self._started * _SEED_STEP) % 2**63,
            is_extra=workers > self._user_workers,
            deadlines=self._deadlines,
        )
        if draws:
            self._seed = pool.seed
        return pool

    def _step_down(self, workers: int, back: int, error: Exception) -> None:
        self._go_back(f"{workers} worker processes failed ({_words(error)})", back)

    def _go_back(self, reason: str, back: int) -> None:
        self._freeze(back)
        then = f"{back} worker processes" if back else "no worker processes"
        with suppress(Exception):
            self._say(f"{reason}; this loader continues with {then} from the next batch, and is not changed again.")


def _words(error: Exception) -> str:
    """Its type and message; from a worker, the last line, which is the error itself."""
    name, lines = type(error).__name__, str(error).strip().splitlines()
    text = lines[-1].strip() if lines else ""
    return text if text.startswith(name) or not text else f"{name}: {text}"


class Epoch:
    """Hands out the batches of one epoch. Dropping it ends its workers, unless they persist.

    Args:
        loader: Provides its workers.
        indices: The epoch.
    """

    def __init__(self, loader: ResizableLoader, indices: EpochIndices) -> None:
        self.pool: WorkerPool | None = None
        self._loader = loader
        self._indices = indices
        self._has_ended = False

    def start(self, *, draws: bool = False) -> None:
        """Starts workers, which otherwise start with the first batch."""
        self.pool = self._loader.pool(self._indices, draws=draws)

    def park(self) -> None:
        """Gives its workers back until the next batch is asked for, which is the one that is due."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.sampler.take_back()
            self._loader.leave(pool)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._loader.observer.asked()
        while not self._has_ended:
            if self.pool is None:
                self.start()
            pool = self.pool
            assert pool is not None
            try:
                batch = pool.next_batch()
            except StopIteration:
                self.pool = None
                if pool.sampler.leaves_rest:
                    self._loader.end(pool)
                else:
                    self._has_ended = True
                    self._loader.release(pool)
            except Exception as error:
                if self._indices.has_failed or not self._loader.falls_back(pool, error):
                    # Torch continues with the next batch if the user asks for one.
                    pool.handed()
                    raise
                self.pool = None
                self._loader.end(pool)
            else:
                pool.handed()
                self._loader.given(pool, batch)
                return batch
        raise StopIteration

    def __len__(self) -> int:
        return len(self._indices)
