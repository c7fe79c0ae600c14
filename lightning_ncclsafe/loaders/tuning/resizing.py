"""Changes how many workers a live loader has, and how far ahead they are: no sample is lost, repeated or moved.

The random streams of the training stay the same: samplers begin when and as often as with torch, and one number is
drawn for each epoch where torch draws one. Two things depend on the number of workers as such, with stock torch as
well: what ``Dataset.__getitem__`` draws, and, when an epoch is left early, how far ahead a sampler is that draws
numbers for each batch or at its end (as ``RandomSampler(generator=…)`` does). Fewer batches ahead change nothing: each
is made by the same worker, and samplers are asked when torch would ask them.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from lightning_ncclsafe._torch import loading
from lightning_ncclsafe.loaders.tuning.eligibility import forks, unforkable_dataset
from lightning_ncclsafe.loaders.tuning.measuring import BatchSize, Interval, Measurement, Observer
from lightning_ncclsafe.loaders.tuning.worker_pool import (
    Deadlines,
    EpochIndices,
    PoolSampler,
    TargetSetting,
    WorkerPool,
    WorkerSetting,
)

# Any odd number with well mixed bits, so that the seeds of consecutive pools have nothing in common.
_SEED_STEP = 0x9E3779B97F4A7C15


class ResizableLoader:
    """Reads a loader with workers that can be changed at any time.

    Args:
        loader: The user's ``DataLoader``, for which :func:`unresizable` is empty. It is not changed.
        workers: ``num_workers`` to begin with.
        prefetch: ``prefetch_factor`` to begin with; irrelevant without workers.
        on_measured: Called with each measurement, on the thread that reads.
        workers_at: Number of workers for an interval, asked when it begins; None for no change.
        most_ahead: How many batches may be ready or in the making, given the largest so far; None for as many as are
            set. Before the first batch, there is one for each worker.
        epochs: Number of earlier epochs of the loader.
        user_workers: What counts as the user's ``num_workers``; None for that of the loader.

    Attributes:
        frozen: Why it takes no more settings; empty while it does.
        observer: Measures it.
    """

    def __init__(
        self,
        loader: Any,
        *,
        workers: int,
        prefetch: int,
        say: Callable[[str], None],
        on_measured: Callable[[Measurement], None] = lambda _: None,
        workers_at: Callable[[Interval], int | None] = lambda _: None,
        most_ahead: Callable[[BatchSize], int | None] = lambda _: None,
        epochs: int = 0,
        user_workers: int | None = None,
    ) -> None:
        self.frozen = ""
        self._loader = loader
        self._user = WorkerSetting.of(
            loader.num_workers if user_workers is None else user_workers, loader.prefetch_factor or 0
        )
        self._now = WorkerSetting.of(workers, prefetch)
        self._target = TargetSetting(self._now)
        self._say = say
        self._workers_at = workers_at
        self._most_ahead = most_ahead
        self._prefetch = prefetch
        self._lock = threading.Lock()
        self.observer = Observer(on_measured, epochs=epochs)
        self._deadlines = Deadlines(forks=forks(loader))
        self._epochs: WeakSet[Epoch] = WeakSet()
        self._kept: WorkerPool | None = None
        self._leaving: list[WorkerPool] = []
        self._draws = False
        self._seed = 0
        self._begun = 0
        self._started = 0

    @property
    def workers(self) -> int:
        """Number of workers in force."""
        return self._now.workers

    @property
    def prefetch(self) -> int:
        """Prefetch factor in force; 0 without workers."""
        return self._now.prefetch

    def begin(self) -> Iterator[Any]:
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
        self.observer.begins(self._target.setting.workers, started_at - asked_at)
        return epoch

    def _begin(self) -> "Epoch":
        # Torch resets persistent workers without drawing a number.
        draws = not (self._begun and self._persists)
        self._begun += 1
        # Torch begins the sampler once for each iterator, and once more for each epoch of worker processes.
        loader = self._loader
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        indices = EpochIndices(sampler, begins=2 if self._user.workers and draws else 1)
        epoch = Epoch(self, indices)
        self._epochs.add(epoch)
        if self._user.workers:
            self._begin_at_once(epoch, indices, draws=draws)
        else:
            indices.begin()
            self._seed = loading.draw_base_seed(self._loader)
        return epoch

    def _begin_at_once(self, epoch: "Epoch", indices: EpochIndices, *, draws: bool) -> None:
        self._draws = draws
        try:
            epoch.start()
        finally:
            self._draws = False
        indices.begin_fully()
        # By now, torch has given workers the first indices, and many samplers draw a seed with the first one.
        indices.is_over()

    def resize(self, workers: int, prefetch: int) -> None:
        """Sets how many workers to use, and how far ahead they work; from any thread.

        The batches that the present workers have begun are handed out first. Once frozen, nothing happens.
        """
        with self._lock:
            if not self.frozen:
                self._target.setting = WorkerSetting.of(workers, prefetch)

    def _look_up(self, interval: Interval) -> None:
        workers = self._workers_at(interval)
        if workers is not None:
            self.resize(workers, self._prefetch)

    def freeze(self, reason: str) -> None:
        """Keeps the present setting for good, for a reason that the user can read; from any thread."""
        self._freeze(reason, self._now)

    def _freeze(self, reason: str, setting: WorkerSetting) -> None:
        with self._lock:
            self.frozen = self.frozen or reason
            self._target.setting = setting

    def close(self) -> None:
        """Ends all workers, on the thread that reads. An epoch that is read on has the user's setting."""
        self._freeze("it is closed", self._user)
        for epoch in [*self._epochs]:
            epoch.park()
        self._end_leaving()
        if self._kept is not None:
            self.end(self._kept)

    @property
    def _persists(self) -> bool:
        return bool(self._loader.persistent_workers) and self._user.workers > 0

    # What epochs call.

    def given(self, pool: WorkerPool, batch: Any) -> None:
        """Notes that it is handed out."""
        observer = self.observer
        before = observer.size
        ends = observer.given(batch)
        if observer.size != before:
            pool.limit(self._limit_of(pool.setting))
        if ends:
            self._look_up(Interval(observer.interval.epoch, observer.interval.part + 1))
            observer.begin_part(self._target.setting.workers)

    def _limit_of(self, setting: WorkerSetting) -> int | None:
        size = self.observer.size
        return setting.workers if size is None else self._most_ahead(size)

    def end(self, pool: WorkerPool) -> None:
        """Ends workers."""
        if pool is self._kept:
            self._kept = None
        pool.end()

    def release(self, pool: WorkerPool) -> None:
        """Takes workers back at the end of an epoch; the next epoch may use them."""
        if pool is not self._kept:
            self.end(pool)

    def leave(self, pool: WorkerPool) -> None:
        """Takes workers back from an epoch that is not read on for now: as `release`, without waiting for their end."""
        if pool is not self._kept:
            pool.ask_to_end()
            self._leaving.append(pool)

    def _end_leaving(self) -> None:
        while self._leaving:
            self._leaving.pop().end()

    def pool(self, indices: EpochIndices) -> WorkerPool:
        """Workers with the target setting, for the rest of an epoch."""
        # Another epoch may be read at the same time, as in zip(loader, loader): it keeps its workers.
        kept_is_free = self._kept is None or all(epoch.pool is not self._kept for epoch in self._epochs)
        kept = self._kept if kept_is_free else None
        if kept is None or not self._renewed(kept, indices):
            kept = self._start(indices)
        if self._persists and kept.pids and kept_is_free:
            self._kept = kept
        self._now = kept.setting
        return kept

    def _renewed(self, kept: WorkerPool, indices: EpochIndices) -> bool:
        if self._target.is_for(kept.setting):
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
            self._step_down(pool.setting, self._user, error)
        return pool.is_extra

    def _start(self, indices: EpochIndices) -> WorkerPool:
        draws, self._draws = self._draws, False
        # Again: the dataset may have opened files in this process with its first samples.
        is_extra = self._target.setting.workers > self._user.workers
        if what := unforkable_dataset(self._loader) if is_extra else "":
            self._go_back(what, self._user)
        while True:
            setting = self._target.setting
            try:
                return self._pool_of(setting, indices, draws=draws)
            except Exception as error:
                # Torch would start at least as many.
                is_users = draws and setting.workers <= self._user.workers
                if indices.has_failed or is_users or not setting.workers:
                    raise
                self._step_down(setting, self._back_from(setting), error)
            draws = False

    def _pool_of(self, setting: WorkerSetting, indices: EpochIndices, *, draws: bool) -> WorkerPool:
        self._started += 1
        seed = None if draws else (self._seed + self._started * _SEED_STEP) % 2**63
        sampler = PoolSampler(
            indices, partial(self._target.is_for, setting), self._limit_of(setting) if setting.workers else None
        )
        is_extra = setting.workers > self._user.workers
        pool = WorkerPool(self._loader, setting, sampler, seed=seed, is_extra=is_extra, deadlines=self._deadlines)
        if draws:
            self._seed = pool.seed
        return pool

    def _back_from(self, setting: WorkerSetting) -> WorkerSetting:
        """The setting to use if workers cannot be started: one that is known to work, or one that cannot fail."""
        fewer = [known for known in (self._now, self._user) if known.workers < setting.workers]
        return max(fewer, key=lambda known: known.workers, default=WorkerSetting(0, 0))

    def _step_down(self, setting: WorkerSetting, back: WorkerSetting, error: Exception) -> None:
        self._go_back(f"{setting.workers} worker processes failed ({_words(error)})", back)

    def _go_back(self, reason: str, back: WorkerSetting) -> None:
        then = f"{back.workers} worker processes" if back.workers else "no worker processes"
        self._freeze(reason, back)
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

    def start(self) -> None:
        """Starts workers, which otherwise start with the first batch."""
        self.pool = self._loader.pool(self._indices)

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
                self._pool_ended(pool)
            except Exception as error:
                if not self._continues_after(error, pool):
                    raise
            else:
                pool.handed()
                self._loader.given(pool, batch)
                return batch
        raise StopIteration

    def _pool_ended(self, pool: WorkerPool) -> None:
        self.pool = None
        if pool.sampler.leaves_rest:
            self._loader.end(pool)
        else:
            self._has_ended = True
            self._loader.release(pool)

    def _continues_after(self, error: Exception, pool: WorkerPool) -> bool:
        if self._indices.has_failed or not self._loader.falls_back(pool, error):
            # Torch continues with the next batch if the user asks for one.
            pool.handed()
            return False
        self.pool = None
        self._loader.end(pool)
        return True

    def __len__(self) -> int:
        return len(self._indices)
