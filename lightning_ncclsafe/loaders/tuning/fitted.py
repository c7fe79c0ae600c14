"""One rank's loaders as the tuner has them: resized at once, or from an epoch on, or only watched."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from lightning_ncclsafe import _torch
from lightning_ncclsafe.loaders.endings import Begin
from lightning_ncclsafe.loaders.tuning.choice import Choice
from lightning_ncclsafe.loaders.tuning.measures import Measures
from lightning_ncclsafe.loaders.tuning.messages import Measured, Setting
from lightning_ncclsafe.loaders.tuning.observing import ObservedLoader
from lightning_ncclsafe.loaders.tuning.pools import TunedLoader, unresizable, unsafe
from lightning_ncclsafe.loaders.tuning.room import Room
from lightning_ncclsafe.settings import TunerSettings

ThrottledS = Callable[[], float | None]
Say = Callable[[str], None]


class Fitted:
    """A loader that is only watched, for advice.

    Args:
        loader: The ``DataLoader``.
        start: What it begins with, where it is set.
        number: Of the last window that was measured of it before.
        group: Loaders with the same one are read at the same time.
        room: Keeps the workers of all loaders within the budget.
        say: Prints a line about it to the user.
        throttled_s: Gives for how long quotas have held this rank's processes so far, seconds.

    Attributes:
        advises: Whether it stays as it is.
        iterable: Whether settings hold from an epoch on.
        group: See above.
        number: Of the last window that was measured of it.
    """

    advises: ClassVar[bool] = True
    iterable: ClassVar[bool] = False

    def __init__(
        self, loader: Any, start: Choice, *, number: int, group: str, room: Room, say: Say, throttled_s: ThrottledS
    ) -> None:
        self.group = group
        self.number = number
        self._loader = loader
        self._last: Measures | None = None
        self._room = room
        self._reads = self._make(start, say, throttled_s)
        room.add(self)

    @property
    def alive(self) -> int:
        """How many worker processes it has; those that are not ours may be there at any time."""
        return int(self._loader.num_workers)

    def park(self) -> None:
        """Ends its workers, where they are ours."""

    def begin(self, begin: Begin, setting: Setting | None) -> Iterator[Any]:
        """Begins an epoch.

        Args:
            begin: Begins the loader's own iteration.
            setting: What is set from this epoch on; None for no change.
        """
        own: Iterator[Any] = self._reads.begin(begin)
        return own

    def resize(self, setting: Setting) -> None:
        """Sets it; from any thread."""

    def look(self) -> None:
        """Measures what takes too long for the training thread."""
        self._reads.measure_memory()

    def measured(self, name: str) -> Measured | None:
        """What was last measured; None before the first."""
        last = self._last
        return None if last is None else Measured(loader=name, number=self.number, measures=last, frozen=self._frozen)

    def close(self) -> None:
        """Everything is as it was."""
        self._room.remove(self)

    @property
    def _frozen(self) -> bool:
        return False

    def _make(self, start: Choice, say: Say, throttled_s: ThrottledS) -> Any:
        return ObservedLoader(self._loader, on_window=self._keep, throttled_s=throttled_s)

    def _keep(self, measures: Measures) -> None:
        self._last = measures
        self.number += 1


class FittedAtOnce(Fitted):
    """One of a map-style dataset: its workers are changed while it is read."""

    advises = False

    def begin(self, begin: Begin, setting: Setting | None) -> Iterator[Any]:
        """Begins an epoch; not by the loader's own iteration."""
        own: Iterator[Any] = self._reads.begin()
        return own

    def resize(self, setting: Setting) -> None:
        """Sets it; from any thread."""
        self._reads.resize(setting.workers, setting.prefetch)

    @property
    def alive(self) -> int:
        """How many worker processes it has."""
        return int(self._reads.alive)

    def park(self) -> None:
        """Ends them; it has new ones, and goes on with the batch that is due, as soon as it is read on."""
        self._reads.park()

    def close(self) -> None:
        """Ends its workers."""
        self._reads.close()
        super().close()

    @property
    def _frozen(self) -> bool:
        return bool(self._reads.frozen)

    def _make(self, start: Choice, say: Say, throttled_s: ThrottledS) -> Any:
        return TunedLoader(
            self._loader,
            workers=start.workers,
            prefetch=start.prefetch,
            on_window=self._keep,
            say=say,
            throttled_s=throttled_s,
            make_room=lambda workers: self._room.make(self, workers),
        )


class FittedByEpoch(Fitted):
    """One of an iterable dataset: its number of batches may depend on its workers, so they stay for an epoch."""

    advises = False
    iterable = True

    def begin(self, begin: Begin, setting: Setting | None) -> Iterator[Any]:
        """Begins an epoch, with what is set from it on."""
        if setting is not None:
            self._set(setting.workers, setting.prefetch or None)
        return super().begin(begin, setting)

    def close(self) -> None:
        """The loader is set as it was."""
        self._set(*self._before)
        super().close()

    def _make(self, start: Choice, say: Say, throttled_s: ThrottledS) -> Any:
        self._before = (self._loader.num_workers, self._loader.prefetch_factor)
        self._set(start.workers, start.prefetch or None)
        return super()._make(start, say, throttled_s)

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
        return FittedAtOnce
    if settings.apply and settings.apply_to_iterables and _torch.has_iterable_dataset(loader):
        return Fitted if unsafe(loader) else FittedByEpoch
    return Fitted
