"""One rank's loaders as the tuner has them: read by workers of ours, or set from an epoch on, or only watched."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning_ncclsafe import _torch
from lightning_ncclsafe.loaders.endings import Begin
from lightning_ncclsafe.loaders.tuning.forkable import holds_generator
from lightning_ncclsafe.loaders.tuning.messages import Measured, Setting
from lightning_ncclsafe.loaders.tuning.observing import BatchSize, ObservedLoader
from lightning_ncclsafe.loaders.tuning.pools import TunedLoader, parts_of, unresizable, unsafe
from lightning_ncclsafe.loaders.tuning.stretches import Moment, Stretch
from lightning_ncclsafe.settings import TunerSettings

# What one rank publishes of a loader: enough for rank 0 to see every stretch, were they a tenth of a second each.
_PUBLISHED = 8
# How often a dataset is looked at: some 2 µs an object, and before anything is decided.
_LOOKS = 3
# Lightning's seed_everything sets it, also for the processes that it starts.
_SEED = "PL_GLOBAL_SEED"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a loader is to be read.

    Attributes:
        users: What its user has set, as far as there is room for it: what it begins with.
        epochs: How many epochs of it there were before.
        most_ahead: See :class:`TunedLoader`.
        say: Prints a line about it to the user.
        measured: Is called when there is something new to be published.
    """

    users: int
    epochs: int
    most_ahead: Callable[[BatchSize], int | None]
    say: Callable[[str], None]
    measured: Callable[[], None]


class Fitted:
    """A loader that is only watched, for advice.

    Args:
        loader: The ``DataLoader``.
        reading: How it is to be read.

    Attributes:
        advises: Whether it stays as it is.
        iterable: Whether all ranks have to begin an epoch with the same setting.
        users: What its user has set, as far as there is room for it.
        setting: What rank 0 has decided last; None for nothing yet.
    """

    advises: ClassVar[bool] = True
    iterable: ClassVar[bool] = False

    def __init__(self, loader: Any, reading: Reading) -> None:
        self.users = reading.users
        self.setting: Setting | None = None
        self._loader = loader
        self._tried = 0
        self._last: deque[Stretch] = deque(maxlen=_PUBLISHED)
        self._measured = reading.measured
        self._has_generator = False
        self._reads = self._make(reading)

    @property
    def epochs(self) -> int:
        """How many epochs of it have begun."""
        return int(self._reads.observer.moment.epoch)

    def begin(self, begin: Begin, workers: int | None) -> Iterator[Any]:
        """Begins an epoch.

        Args:
            begin: Begins the loader's own iteration.
            workers: How many workers all ranks have in it, where they have to have the same; None for no change.
        """
        own: Iterator[Any] = self._reads.begin(begin)
        return own

    def workers_at(self, moment: Moment) -> int | None:
        """How many workers it is to have in the stretch that begins; None for no change. A trial lasts for one."""
        setting = self.setting
        if setting is None:
            return None
        trial = setting.trial
        if trial is None or trial.number == self._tried or moment < trial.moment:
            return setting.workers
        self._tried = trial.number
        return trial.workers

    def measured(self, name: str) -> Measured:
        """What there is to be published."""
        return Measured(loader=name, stretches=tuple(self._last), frozen=self._frozen)

    def close(self) -> None:
        """Everything is as it was."""

    @property
    def _frozen(self) -> bool:
        return False

    def _make(self, reading: Reading) -> Any:
        return ObservedLoader(self._loader, on_stretch=self._keep, epochs=reading.epochs)

    def _keep(self, stretch: Stretch) -> None:
        loader = self._loader
        # It may be made with the first sample.
        if len(self._last) < _LOOKS:
            self._has_generator = self._has_generator or holds_generator(loader.dataset)
        seeded = self._has_generator or is_seeded(loader)
        persists = bool(loader.persistent_workers) and loader.num_workers > 0
        self._last.append(replace(stretch, seeded=seeded, persists=persists))
        self._measured()


class FittedByPools(Fitted):
    """One of a map-style dataset: read by workers that can be changed."""

    advises = False

    def begin(self, begin: Begin, workers: int | None) -> Iterator[Any]:
        """Begins an epoch; not by the loader's own iteration."""
        own: Iterator[Any] = self._reads.begin()
        return own

    def close(self) -> None:
        """Ends its workers."""
        self._reads.close()

    @property
    def _frozen(self) -> bool:
        return bool(self._reads.frozen)

    def _make(self, reading: Reading) -> Any:
        return TunedLoader(
            self._loader,
            workers=reading.users,
            users=reading.users,
            prefetch=self._loader.prefetch_factor or 2,
            say=reading.say,
            on_stretch=self._keep,
            workers_at=self.workers_at,
            most_ahead=reading.most_ahead,
            epochs=reading.epochs,
        )


class FittedByEpoch(Fitted):
    """One of an iterable dataset: its number of batches may depend on its workers, so they stay for an epoch."""

    advises = False
    iterable = True

    def begin(self, begin: Begin, workers: int | None) -> Iterator[Any]:
        """Begins an epoch, with what is set from it on."""
        if workers is not None:
            self._set(workers, (self._before[1] or 2) if workers else None)
        return super().begin(begin, workers)

    def close(self) -> None:
        """The loader is set as it was."""
        self._set(*self._before)

    def _make(self, reading: Reading) -> Any:
        self._before = (self._loader.num_workers, self._loader.prefetch_factor)
        self._set(reading.users, self._loader.prefetch_factor)
        return super()._make(reading)

    def _set(self, workers: int, prefetch: int | None) -> None:
        loader = self._loader
        if (workers, prefetch) != (loader.num_workers, loader.prefetch_factor):
            loader.num_workers, loader.prefetch_factor = workers, prefetch
            # Workers that persist would be taken again, however many there are.
            loader._iterator = None


def kind_of(loader: Any, settings: TunerSettings) -> type[Fitted] | None:
    """How a loader is fitted; None for what is no ``DataLoader``.

    Args:
        loader: What Lightning iterates.
        settings: What the user has set.
    """
    if not _torch.is_dataloader(loader):
        return None
    if settings.apply and not unresizable(loader):
        return FittedByPools
    if settings.apply and settings.apply_to_iterables and _torch.has_iterable_dataset(loader):
        return Fitted if unsafe(loader) else FittedByEpoch
    return Fitted


def is_seeded(loader: Any) -> bool:
    """Whether what a loader gives follows from a seed: of the run, or of a generator that its user has given it."""
    own = (getattr(part, "__dict__", {}).get("generator") for part in parts_of(loader))
    return _SEED in os.environ or _torch.is_seeded() or any(generator is not None for generator in own)
