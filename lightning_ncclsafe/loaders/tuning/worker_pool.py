"""One set of worker processes of a loader, and what it draws from in place of the sampler.

Workers can be replaced in the middle of an epoch because the order of its samples lives outside of them: each epoch has
one iterator over the user's own batch sampler, and pools draw from it. When other workers are wanted, a pool hands out
what it has drawn and ends, and the next pool continues from there.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from lightning_ncclsafe._torch import loading

# A thread pool, a lock or a client in the dataset that does not survive a fork makes workers wait forever.
_FIRST_S = 5.0
# While it is unknown how long a batch takes: the first one from cold storage may take tens of seconds.
_UNKNOWN_S = 30.0
# Also where workers are not forked, as each imports everything first.
_LATER_S = 60.0
# More than sharing one core, or a file system, can slow a batch down.
_TIMES = 20.0


class EpochIndices:
    """One epoch of a loader's batch sampler, or of its sampler if it does not collate.

    Args:
        begins: How often torch calls ``iter(sampler)`` for this epoch, in which samplers may draw random numbers.

    Attributes:
        has_failed: Whether the sampler has raised, which is the user's error, whichever pool was drawing.
    """

    def __init__(self, sampler: Iterable[Any], begins: int) -> None:
        self.has_failed = False
        self._sampler = sampler
        self._begins = begins
        self._iterator: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()
        self._has_ended = False

    def begin(self) -> None:
        """Begins the sampler, unless it has begun as often as with torch."""
        if self._begins > 0:
            self._begins -= 1
            self._iterator = self._by_user(lambda: iter(self._sampler))

    def begin_fully(self) -> None:
        """Begins the sampler as often as torch does, if a pool has not."""
        while self._begins > 0:
            self.begin()

    def take(self) -> Any:
        """The next index.

        Raises:
            StopIteration: If there is none.
        """
        return self._ahead.popleft() if self._ahead else self._draw()

    def give_back(self, indices: Iterable[Any]) -> None:
        """Makes these due again, in this order, before all others."""
        self._ahead.extendleft(reversed([*indices]))

    def is_over(self) -> bool:
        """Whether there is no next index; it is drawn to find out."""
        if not self._ahead and not self._has_ended:
            self.draw_ahead()
        return not self._ahead

    def draw_ahead(self) -> None:
        """Draws the next index and keeps it."""
        with suppress(StopIteration):
            self._ahead.append(self._draw())

    def _draw(self) -> Any:
        try:
            return self._by_user(self._iterator.__next__)
        except StopIteration:
            self._has_ended = True
            raise

    def _by_user(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except StopIteration:
            raise
        except BaseException:
            self.has_failed = True
            raise

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type] # what has no length with torch has none here


class PoolSampler:
    """Takes the place of the sampler in one pool of workers, over all of its epochs.

    Args:
        indices: What it draws from.
        most: See below.

    Attributes:
        most: Most batches that may be drawn and not yet handed out; None for as many as torch asks for.
        unhanded: The indices that the pool has drawn and not yet handed out as batches, by number from 0 in each epoch;
            ``num_workers * prefetch_factor`` at most.
    """

    def __init__(self, indices: EpochIndices, most: int | None) -> None:
        self.most = most
        self.renew(indices)

    def renew(self, indices: EpochIndices) -> None:
        """Draws from another epoch."""
        self._indices = indices
        self._count = self._kept_back = 0
        self._is_shut = False
        self.unhanded: dict[int, Any] = {}

    @property
    def leaves_rest(self) -> bool:
        """Whether the pool has ended and the epoch has not."""
        return not self.unhanded and not self._indices.is_over()

    @property
    def waits(self) -> bool:
        """Whether an index that torch has asked for was kept back and is available now."""
        return bool(self._kept_back) and not self._is_full and not self._is_shut

    @property
    def _is_full(self) -> bool:
        return self.most is not None and len(self.unhanded) >= self.most

    def __iter__(self) -> "PoolSampler":
        self._indices.begin()
        return self

    def __next__(self) -> Any:
        if self._is_shut:
            raise StopIteration
        if self._is_full:
            # The sampler may draw from a generator that others use, so it is asked when torch asks it.
            self._kept_back += 1
            self._indices.draw_ahead()
            raise StopIteration
        self._kept_back = max(self._kept_back - 1, 0)
        index = self._indices.take()
        self.unhanded[self._count] = index
        self._count += 1
        return index

    def __len__(self) -> int:
        return len(self._indices)

    def handed(self, pending: Iterable[int] | None = None) -> None:
        """Notes that the pool has handed out a batch; one that does not keep the order gives those still pending."""
        if pending is None:
            self.unhanded.pop(next(iter(self.unhanded), -1), None)
            return
        for number in self.unhanded.keys() - set(pending):
            del self.unhanded[number]

    def shut(self) -> None:
        """Lets the pool draw no more in this epoch: it ends once it has handed out what it has drawn."""
        self._is_shut = True

    def take_back(self) -> None:
        """Makes due again what the pool has not handed out, and shuts it."""
        self.shut()
        self._indices.give_back(self.unhanded.values())
        self.unhanded = {}


class Deadlines:
    """How long workers of a loader that the user has not asked for may be silent before they are given up.

    Args:
        forks: Whether workers are forked, which starts them at once.
    """

    def __init__(self, *, forks: bool) -> None:
        self._forks = forks
        self._slowest_s = 0.0

    def note(self, took_s: float) -> None:
        """Notes how long a batch took to make, or was waited for; seconds."""
        self._slowest_s = max(self._slowest_s, took_s)

    def of_batch(self, *, is_first: bool) -> float:
        """How long to wait for a batch, which may be the first of its workers; seconds."""
        least_s = _LATER_S
        if is_first and self._forks:
            least_s = _FIRST_S if self._slowest_s else _UNKNOWN_S
        return max(least_s, _TIMES * self._slowest_s)


class WorkerPool:
    """Reads one epoch of a loader with this many workers, or several epochs if they persist.

    Args:
        loader: The user's ``DataLoader``; it is not changed.
        workers: ``num_workers``.
        sampler: What it draws from.
        seed: Base of its workers' random numbers; None to draw it as torch does.
        is_extra: Whether it has more workers than the user asks for.
        deadlines: How long such workers may be silent.

    Attributes:
        iterator: Torch's iterator.
        pids: The process ids of its workers.
        seed: The number that was drawn.

    Raises:
        Exception: Whatever torch, pickle and the system raise if workers cannot start, and whatever the user's sampler
            raises.
    """

    def __init__(
        self,
        loader: Any,
        workers: int,
        sampler: PoolSampler,
        *,
        seed: int | None,
        is_extra: bool,
        deadlines: Deadlines,
    ) -> None:
        self.workers = workers
        self.sampler = sampler
        self.is_extra = is_extra
        self._deadlines = deadlines
        self._is_first = True
        self._is_silent = False
        self._is_in_order = bool(loader.in_order)
        generator = loader.generator if seed is None else loading.generator_from(seed)
        self._loader = _copy_of(loader, workers, sampler, generator)
        self.iterator: Iterator[Any] = loading.begin_loading(self._loader)
        self.pids = loading.worker_pids(self.iterator)
        self.seed = loading.base_seed_of(self.iterator)

    def renew(self, indices: EpochIndices) -> None:
        """Begins another epoch with the same workers."""
        self.sampler.renew(indices)
        self._is_first = False
        with self._in_time():
            self.iterator._reset(self._loader)  # type: ignore[attr-defined]

    def next_batch(self) -> Any:
        """The batch that is due.

        Raises:
            WorkersSilent: If workers that the user has not asked for do not answer in time.
            Exception: What the iterator raises, ``StopIteration`` at its end.
        """
        began_s = time.monotonic()
        try:
            with self._in_time():
                batch = next(self.iterator)
        except loading.WorkersSilent:
            self._is_silent = True
            raise
        self._is_first = False
        self._deadlines.note(time.monotonic() - began_s)
        return batch

    def _in_time(self) -> AbstractContextManager[None]:
        if not self.is_extra:
            return nullcontext()
        return loading.answered_within(self.iterator, self._deadlines.of_batch(is_first=self._is_first))

    def handed(self) -> None:
        """Notes that it has handed out a batch."""
        if self._is_in_order or not self.pids:
            self.sampler.handed()
        else:
            self.sampler.handed(loading.pending_batches(self.iterator))
        self._fill()

    def limit(self, most: int | None) -> None:
        """Limits the batches ahead; None for as many as torch asks for."""
        if self.pids:
            self.sampler.most = most
            self._fill()

    def _fill(self) -> None:
        while self.sampler.waits:
            loading.ask_for_batch(self.iterator)

    def ask_to_end(self) -> None:
        """Asks its workers to end; :meth:`end` waits for them. Their unfinished batches are already taken back."""
        if not self._is_silent:
            loading.ask_to_end_loading(self.iterator)

    def end(self) -> None:
        """Ends its workers and waits for them. What it has not handed out is due again."""
        self.sampler.take_back()
        # Explicitly, so that workers are gone before the first batch of their successors.
        loading.end_loading(self.iterator, at_once=self._is_silent)
        self.pids = ()


def _copy_of(loader: Any, workers: int, sampler: PoolSampler, generator: Any) -> Any:
    """A loader that shares everything else with the user's; none of the user's code is called."""
    copy = object.__new__(type(loader))
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(copy).update(vars(loader))
    vars(copy).update(
        {
            attribute: sampler,
            "num_workers": workers,
            # None without workers, with which it is 2 by default.
            "prefetch_factor": (loader.prefetch_factor or 2) if workers else None,
            "persistent_workers": loader.persistent_workers and workers > 0,
            "timeout": loader.timeout if workers else 0,
            "generator": generator,
            "_iterator": None,
        }
    )
    return copy
