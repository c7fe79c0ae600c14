"""What makes a loader's workers replaceable in the middle of an epoch: the order of its samples lives outside of them.

One iterator over the user's own batch sampler is made for an epoch. Each pool of workers draws from it through a gate;
when the gate is shut, the pool hands out what it has drawn already and ends, and the next pool goes on from there.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """What is set of a loader.

    Attributes:
        workers: ``num_workers``.
        prefetch: ``prefetch_factor``; 0 without workers, at least 1 with them.
    """

    workers: int
    prefetch: int

    @classmethod
    def of(cls, workers: int, prefetch: int) -> "Setting":
        """A setting that a ``DataLoader`` takes."""
        return cls(workers, max(prefetch, 1)) if workers > 0 else cls(0, 0)


class Wish:
    """The setting that is wanted, by whoever may be asking.

    Attributes:
        setting: The setting.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def is_for(self, setting: Setting) -> bool:
        """Whether it is this one."""
        return self.setting == setting


class Indices:
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


class Gate:
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

    def __init__(self, indices: Indices, is_wanted: Callable[[], bool], most: int | None = None) -> None:
        self._is_wanted = is_wanted
        self.most = most
        self.renew(indices)

    def renew(self, indices: Indices) -> None:
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

    def __iter__(self) -> "Gate":
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
