"""One rank's loaders as the tuner has them: map-style, iterable, or only advised on."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_ncclsafe._torch import loading
from lightning_ncclsafe.loaders.iteration import Begin
from lightning_ncclsafe.loaders.tuning.deciding import LoaderReport, LoaderSetting
from lightning_ncclsafe.loaders.tuning.eligibility import holds_generator, is_resizable, is_safe, is_seeded
from lightning_ncclsafe.loaders.tuning.measuring import (
    BatchSize,
    Interval,
    Measurement,
    ObservedIterator,
    Observer,
)
from lightning_ncclsafe.loaders.tuning.resizing import ResizableLoader
from lightning_ncclsafe.settings import TunerSettings

# Measurements of a loader that a rank publishes: rank 0 sees every interval even if each lasts a tenth of a second.
_PUBLISHED = 8
# How often a dataset is searched, at about 2 µs an object, all before anything is decided.
_LOOKS = 3


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How to read a loader.

    Attributes:
        user_workers: The user's ``num_workers``, as far as there is room: what it begins with.
        epochs: Number of its earlier epochs.
        most_ahead: See :class:`ResizableLoader`.
        workers_of_epoch: How many workers all ranks use in the epoch that begins, where it must be the same number;
            None for no change.
        say: Prints a line about it to the user.
        measured: Called when there is something new to publish.
    """

    user_workers: int
    epochs: int
    most_ahead: Callable[[BatchSize], int | None]
    workers_of_epoch: Callable[["AdvisedLoader"], int | None]
    say: Callable[[str], None]
    measured: Callable[[], None]


class AdvisedLoader:
    """A loader that is only measured, for advice.

    Args:
        options: How to read it.

    Attributes:
        user_workers: The user's ``num_workers``, as far as there is room.
        setting: The last decision of rank 0; None before the first.
    """

    def __init__(self, loader: Any, options: LoaderOptions) -> None:
        self.user_workers = options.user_workers
        self.setting: LoaderSetting | None = None
        self._loader = loader
        self._tried: Interval | None = None
        self._last: deque[Measurement] = deque(maxlen=_PUBLISHED)
        self._options = options
        self._has_generator = False
        self._observer = Observer(self._keep, epochs=options.epochs)

    @property
    def epochs(self) -> int:
        """Number of epochs that have begun."""
        return self._observer.interval.epoch

    def begin(self, begin: Begin) -> Iterator[Any]:
        """Begins an epoch, given what begins the loader's own iteration."""
        return ObservedIterator(self._loader, begin, self._observer)

    def workers_at(self, interval: Interval) -> int | None:
        """How many workers to use in the interval that begins; None for no change. A trial lasts for one interval."""
        setting = self.setting
        if setting is None:
            return None
        trial = setting.trial
        if trial is None or trial.interval == self._tried or interval < trial.interval:
            return setting.workers
        self._tried = trial.interval
        return trial.workers

    def measured(self, name: str) -> LoaderReport:
        """What to publish."""
        return LoaderReport(loader=name, measurements=tuple(self._last))

    def close(self) -> None:
        """Restores everything."""

    def _keep(self, measurement: Measurement) -> None:
        loader = self._loader
        # The generator may be created with the first sample.
        if len(self._last) < _LOOKS:
            self._has_generator = self._has_generator or holds_generator(loader.dataset)
        seeded = self._has_generator or is_seeded(loader)
        persists = bool(loader.persistent_workers) and loader.num_workers > 0
        self._last.append(replace(measurement, seeded=seeded, persists=persists))
        self._options.measured()


class MapStyleLoader(AdvisedLoader):
    """A loader of a map-style dataset, whose workers can be changed at any time."""

    def __init__(self, loader: Any, options: LoaderOptions) -> None:
        super().__init__(loader, options)
        self._resizable = ResizableLoader(
            loader,
            self._observer,
            user_workers=options.user_workers,
            say=options.say,
            workers_at=self.workers_at,
            most_ahead=options.most_ahead,
        )

    def begin(self, begin: Begin) -> Iterator[Any]:
        """Begins an epoch, without the loader's own iteration."""
        return self._resizable.begin()

    def measured(self, name: str) -> LoaderReport:
        """What to publish."""
        return replace(super().measured(name), frozen=self._resizable.frozen)

    def close(self) -> None:
        """Ends its workers."""
        self._resizable.close()


class IterableLoader(AdvisedLoader):
    """A loader of an iterable dataset: its batches may depend on its workers, so these stay for an epoch."""

    def __init__(self, loader: Any, options: LoaderOptions) -> None:
        super().__init__(loader, options)
        self._before = (loader.num_workers, loader.prefetch_factor)
        self._set(options.user_workers, loader.prefetch_factor)

    def begin(self, begin: Begin) -> Iterator[Any]:
        """Begins an epoch with the setting for it."""
        workers = self._options.workers_of_epoch(self)
        if workers is not None:
            self._set(workers, (self._before[1] or 2) if workers else None)
        return super().begin(begin)

    def close(self) -> None:
        """Restores the loader's setting."""
        self._set(*self._before)

    def _set(self, workers: int, prefetch: int | None) -> None:
        loader = self._loader
        if (workers, prefetch) != (loader.num_workers, loader.prefetch_factor):
            loader.num_workers, loader.prefetch_factor = workers, prefetch
            # Persistent workers would be used again, however many there are.
            loader._iterator = None


def kind_of(loader: Any, settings: TunerSettings) -> type[AdvisedLoader] | None:
    """How a loader is tuned; None for what is left alone: any but a ``DataLoader``, and one that is unsafe to change.

    Args:
        loader: What Lightning iterates.
    """
    if not loading.is_dataloader(loader) or not is_safe(loader):
        return None
    if settings.apply and is_resizable(loader):
        return MapStyleLoader
    if settings.apply and settings.apply_to_iterables and loading.has_iterable_dataset(loader):
        return IterableLoader
    return AdvisedLoader
