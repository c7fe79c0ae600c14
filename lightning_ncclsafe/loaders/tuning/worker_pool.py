"""One set of worker processes of a loader, and what it draws from in place of the sampler.

Workers can be replaced in the middle of an epoch because the order of its samples lives outside of them. One iterator
over the user's own batch sampler is made for an epoch. Each pool of workers draws from it; when other workers are
wanted, the pool hands out what it has drawn already and ends, and the next pool goes on from there.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from lightning_ncclsafe import _torch

# A thread pool, a lock or a client of the dataset's that was not made for being forked makes workers wait for ever.
_FIRST_S = 5.0
# Not known how long a batch takes: the first one of a cold storage may take tens of seconds.
_UNKNOWN_S = 30.0
# Also where workers are not forked: each of them imports everything first.
_LATER_S = 60.0
# More than workers that share one core, or a file system that others use as well, make of a batch's time.
_TIMES = 20.0


@dataclass(frozen=True, slots=True)
class WorkerSetting:
    """What is set of a loader.

    Attributes:
        workers: ``num_workers``.
        prefetch: ``prefetch_factor``; 0 without workers, at least 1 with them.
    """

    workers: int
    prefetch: int

    @classmethod
    def of(cls, workers: int, prefetch: int) -> "WorkerSetting":
        """A setting that a ``DataLoader`` takes."""
        return cls(workers, max(prefetch, 1)) if workers > 0 else cls(0, 0)


class TargetSetting:
    """The setting that is wanted, by whoever may be asking.

    Attributes:
        setting: The setting.
    """

    def __init__(self, setting: WorkerSetting) -> None:
        self.setting = setting

    def is_for(self, setting: WorkerSetting) -> bool:
        """Whether it is this one."""
        return self.setting == setting


class EpochIndices:
    """One epoch of a loader's batch sampler, or of its sampler where it does not collate.

    Args:
        sampler: The sampler.
        begins: How often torch would call ``iter(sampler)`` for this epoch: samplers may draw random numbers in it.

    Attributes:
        has_failed: Whether the sampler has raised: that is the user's error, whoever was drawing.
    """

    def __init__(self, sampler: Iterable[Any], begins: int) -> None:
        self.has_failed = False
        self._sampler = sampler
        self._begins = begins
        self._iterator: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()
        self._has_ended = False

    def begin(self) -> None:
        """Begins the sampler, unless that has been done as often as torch would have."""
        if self._begins > 0:
            self._begins -= 1
            self._iterator = self._by_user(lambda: iter(self._sampler))

    def begin_fully(self) -> None:
        """Begins the sampler as often as torch would have, where a pool has not."""
        while self._begins > 0:
            self.begin()

    def take(self) -> Any:
        """The next index.

        Raises:
            StopIteration: If there is none.
        """
        return self._ahead.popleft() if self._ahead else self._draw()

    def give_back(self, indices: Iterable[Any]) -> None:
        """These are due again, in this order, before all others."""
        self._ahead.extendleft(reversed([*indices]))

    def is_over(self) -> bool:
        """Whether there is no next index; it is drawn to find out."""
        if not self._ahead and not self._has_ended:
            self.draw_ahead()
        return not self._ahead

    def draw_ahead(self) -> None:
        """Draws the next index, and keeps it."""
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
        return len(self._sampler)  # type: ignore[arg-type] # of what torch could not tell the length of, we cannot


class PoolSampler:
    """What one pool of workers has in place of the sampler, over all epochs that it lives for.

    Args:
        indices: What it draws from.
        is_wanted: Whether the pool may go on drawing. Once it may not, it never may again: torch asks once for each
            batch it hands out, so a pool that was refused would have fewer batches ahead for the rest of the epoch.
        most: See below.

    Attributes:
        most: Most batches that are to be drawn and not yet handed out; None for as many as torch asks for.
        unhanded: By number, from 0 in each epoch, the indices that the pool has drawn and not yet handed out as
            batches; those are ``workers * prefetch`` at most.
    """

    def __init__(self, indices: EpochIndices, is_wanted: Callable[[], bool], most: int | None = None) -> None:
        self._is_wanted = is_wanted
        self.most = most
        self.renew(indices)

    def renew(self, indices: EpochIndices) -> None:
        """Draws from another epoch."""
        self._indices = indices
        self._count = self._kept_back = 0
        self._is_shut = False
        self.unhanded: dict[int, Any] = {}

    @property
    def goes_on(self) -> bool:
        """Whether the pool has ended and the epoch has not."""
        return not self.unhanded and not self._indices.is_over()

    @property
    def waits(self) -> bool:
        """Whether an index that torch has asked for was kept back, and may be had now."""
        return bool(self._kept_back) and not self._is_full and not self._is_shut

    @property
    def _is_full(self) -> bool:
        return self.most is not None and len(self.unhanded) >= self.most

    def __iter__(self) -> "PoolSampler":
        self._indices.begin()
        return self

    def __next__(self) -> Any:
        if self._is_shut or not self._is_wanted():
            self._is_shut = True
            raise StopIteration
        if self._is_full:
            # The sampler may draw from a generator that others use: it is asked when torch asks it.
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
        """The pool has handed out a batch.

        Args:
            pending: The numbers that it still has, for a pool that does not keep to the order.
        """
        if pending is None:
            self.unhanded.pop(next(iter(self.unhanded), -1), None)
            return
        for number in self.unhanded.keys() - set(pending):
            del self.unhanded[number]

    def take_back(self) -> None:
        """What the pool has not handed out is due again; it is to be asked for nothing more."""
        self._is_shut = True
        self._indices.give_back(self.unhanded.values())
        self.unhanded = {}


class Deadlines:
    """Those of one loader.

    Args:
        forks: Whether workers are forked, and are there at once.
    """

    def __init__(self, *, forks: bool) -> None:
        self._forks = forks
        self._slowest_s = 0.0

    def note(self, took_s: float) -> None:
        """A batch took so long, wherever it was made, or was waited for so long; seconds."""
        self._slowest_s = max(self._slowest_s, took_s)

    def of_batch(self, *, is_first: bool) -> float:
        """How long a batch may be waited for, seconds.

        Args:
            is_first: Whether its workers have not handed out any yet.
        """
        least_s = _LATER_S
        if is_first and self._forks:
            least_s = _FIRST_S if self._slowest_s else _UNKNOWN_S
        return max(least_s, _TIMES * self._slowest_s)


class WorkerPool:
    """Reads one epoch of a loader with one setting; several epochs where its workers persist.

    Args:
        loader: The user's ``DataLoader``; it is not changed.
        setting: How many workers, and how far ahead.
        sampler: What it draws from.
        seed: What its workers' random numbers follow from; None to draw it where torch does.
        is_extra: Whether it has more workers than the user has asked for.
        deadlines: How long such workers may be silent.

    Attributes:
        iterator: Torch's iterator.
        pids: The process ids of its workers.
        seed: The number that was drawn.

    Raises:
        Exception: Whatever torch, pickle and the system raise where workers cannot be started, and what the user's
            sampler raises.
    """

    def __init__(
        self,
        loader: Any,
        setting: WorkerSetting,
        sampler: PoolSampler,
        *,
        seed: int | None,
        is_extra: bool,
        deadlines: Deadlines,
    ) -> None:
        self.setting = setting
        self.sampler = sampler
        self.is_extra = is_extra
        self._deadlines = deadlines
        self._is_first = True
        self._is_silent = False
        self._is_in_order = bool(getattr(loader, "in_order", True))
        generator = loader.generator if seed is None else _torch.generator_from(seed)
        self._loader = _copy_of(loader, setting, sampler, generator)
        self.iterator: Iterator[Any] = _torch.begin_loading(self._loader)
        self.pids = _torch.worker_pids(self.iterator)
        self.seed = _torch.base_seed_of(self.iterator)

    def renew(self, indices: EpochIndices) -> None:
        """Begins another epoch with the same workers."""
        self.sampler.renew(indices)
        self._is_first = False
        with self._in_time():
            self.iterator._reset(self._loader)  # type: ignore[attr-defined]

    def next_batch(self) -> Any:
        """The batch that is due.

        Raises:
            WorkersSilent: Workers that the user has not asked for have not answered in time.
            Exception: What the iterator raises, ``StopIteration`` at its end.
        """
        began_s = time.monotonic()
        try:
            with self._in_time():
                batch = next(self.iterator)
        except _torch.WorkersSilent:
            self._is_silent = True
            raise
        self._is_first = False
        self._deadlines.note(time.monotonic() - began_s)
        return batch

    def _in_time(self) -> AbstractContextManager[None]:
        within_s = self._deadlines.of_batch(is_first=self._is_first) if self.is_extra else None
        return _torch.answered_within(self.iterator, within_s)

    def handed(self) -> None:
        """It has handed out a batch."""
        if self._is_in_order or not self.pids:
            self.sampler.handed()
        else:
            self.sampler.handed(_torch.pending_batches(self.iterator))
        self._fill()

    def limit(self, most: int | None) -> None:
        """Has no more batches ahead than so many from now on; None for as many as its setting says."""
        if self.pids:
            self.sampler.most = most
            self._fill()

    def _fill(self) -> None:
        while self.sampler.waits:
            _torch.ask_for_batch(self.iterator)

    def ask_to_end(self) -> None:
        """Has its workers end, and does not wait for them: :meth:`end` does. What they had to make was taken back."""
        if not self._is_silent:
            _torch.ask_to_end_loading(self.iterator)

    def end(self) -> None:
        """Ends its workers and waits for them; what it has not handed out is due again."""
        self.sampler.take_back()
        # Not left to chance: workers are gone before the first batch of those that follow.
        _torch.end_loading(self.iterator, at_once=self._is_silent)
        self.pids = ()


def _copy_of(loader: Any, setting: WorkerSetting, sampler: PoolSampler, generator: Any) -> Any:
    """A loader that shares everything with the user's but this; made without anything of the user's being called."""
    copy = object.__new__(type(loader))
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(copy).update(vars(loader))
    vars(copy).update(
        {
            attribute: sampler,
            "num_workers": setting.workers,
            "prefetch_factor": setting.prefetch or None,
            "persistent_workers": loader.persistent_workers and setting.workers > 0,
            "timeout": loader.timeout if setting.workers else 0,
            "generator": generator,
            "_iterator": None,
        }
    )
    return copy
