"""Rank 0's part: from the measurements of all ranks, one setting for each loader, the same on all."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.measuring import INTERVAL_S, Interval, Measurement, slowest_of
from lightning_ncclsafe.loaders.tuning.trials import Forecast, Trial, TrialOutcome, Trials
from lightning_ncclsafe.report.times import share_words, time_words

# Why a loader stays as it is, and what to do.
ADVICE_ONLY = "LoaderTuner(apply=False) only advises: set it"
SEEDED = (
    "the run is seeded, and random augmentation depends on num_workers: set it yourself, or let "
    "LoaderTuner(apply_to_seeded=True) try it"
)
ITERABLE = "the batches of an iterable dataset may depend on num_workers: set it if yours do not"
PERSISTS = "persistent workers may keep what they have read: set it"
OWN_WAY = "its class overrides iteration: set it"

# Measurements of a rank that are kept until all ranks have measured the same intervals.
_KEPT = 32
_NEVER = Interval(0)
# Advice is given only for a gain that is certain.
_SURE = 0.25
# Ranks read the decision every quarter of a second: they have it before an epoch of this length is over.
_LONG_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """What one rank has measured of one loader.

    Attributes:
        loader: Name of the loader: ``"train_dataloader"``, ``"val_dataloader[1]"``.
        measurements: The last ones.
        frozen: Whether the loader takes no more settings on this rank.
    """

    loader: str
    measurements: tuple[Measurement, ...] = ()
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetting:
    """What all ranks set one loader to.

    Attributes:
        loader: Name of the loader.
        user_workers: The user's ``num_workers``, as far as there is room.
        workers: ``num_workers``, from the next interval on.
        trial: What is tried for one interval; None for nothing.
    """

    loader: str
    user_workers: int
    workers: int
    trial: Trial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What rank 0 publishes.

    Attributes:
        settings: Those of all loaders.
        settled: Whether no loader will change any more.
    """

    settings: tuple[LoaderSetting, ...] = ()
    settled: bool = False


@dataclass(kw_only=True)
class _Loader:
    """What rank 0 knows of one loader; see also :meth:`Deciding.begin`.

    Attributes:
        measurements: Those of each rank, by interval.
        seen: The last interval that all ranks have measured.
        is_fixed: Whether it stays as it is.
        is_over: Whether a rank takes no more settings for it.
        is_advised: Whether the user knows what more workers would gain.
    """

    group: str
    user_workers: int
    why_fixed: str
    trials: Trials
    measurements: dict[int, dict[Interval, Measurement]] = field(default_factory=dict)
    seen: Interval = _NEVER
    is_fixed: bool = False
    is_over: bool = False
    is_advised: bool = False


class Deciding:
    """Decides for all loaders of one call of the Trainer.

    Args:
        applies_to_seeded: Whether loaders of seeded runs change, too.
    """

    def __init__(self, budget: Budget, world_size: int, *, applies_to_seeded: bool, say: Callable[[str], None]) -> None:
        self._budget = budget
        self._world_size = world_size
        self._applies_to_seeded = applies_to_seeded
        self._say = say
        self._loaders: dict[str, _Loader] = {}

    def begin(self, name: str, user_workers: int, *, group: str, why_fixed: str, forks: bool) -> None:
        """Notes that a loader is about to be used, for the first time or again.

        Args:
            user_workers: The user's ``num_workers``, as far as there is room: what it begins with.
            group: Loaders of the same group have workers at the same time.
            why_fixed: Why it stays as it is, for the user; empty if it may change.
            forks: Whether its workers are forked, which starts them at once.
        """
        known = self._loaders.get(name)
        if known is None or (known.user_workers, known.why_fixed) != (user_workers, why_fixed):
            trials = Trials(user_workers, forks=forks)
            self._loaders[name] = _Loader(group=group, user_workers=user_workers, why_fixed=why_fixed, trials=trials)

    def add(self, rank: int, reports: Iterable[LoaderReport]) -> None:
        """Takes what a rank has published."""
        for report in reports:
            loader = self._loaders.get(report.loader)
            if loader is None:
                continue
            # One rank had to go back to fewer workers; the loader is left alone from then on.
            loader.is_over = loader.is_over or report.frozen
            own = loader.measurements.setdefault(rank, {})
            own.update((each.interval, each) for each in report.measurements if each.interval > loader.seen)
            for interval in sorted(own)[:-_KEPT]:
                del own[interval]

    def decide(self) -> Decision:
        """What all ranks set from the next interval on."""
        for name, loader in self._loaders.items():
            for measurement in self._complete(loader):
                self._consider(name, loader, measurement)
        settings = (
            LoaderSetting(
                loader=name,
                user_workers=loader.user_workers,
                workers=loader.trials.workers,
                trial=None if loader.is_over else loader.trials.trial,
            )
            for name, loader in self._loaders.items()
            if not loader.why_fixed
        )
        is_settled = all(loader.is_fixed or loader.is_over for loader in self._loaders.values())
        return Decision(settings=tuple(settings), settled=is_settled)

    def _complete(self, loader: _Loader) -> list[Measurement]:
        """What all ranks have measured since the last call, with the same workers."""
        ranks = loader.measurements
        if len(ranks) < self._world_size:
            return []
        intervals = sorted(set.intersection(*(set(own) for own in ranks.values())))
        found = [slowest_of([own.pop(interval) for own in ranks.values()]) for interval in intervals]
        loader.seen = max([loader.seen, *intervals])
        return [measurement for measurement in found if measurement is not None]

    def _consider(self, name: str, loader: _Loader, measurement: Measurement) -> None:
        if loader.is_over:
            return
        room = self._room(loader)
        why_fixed = loader.why_fixed
        if not why_fixed and measurement.seeded and not self._applies_to_seeded:
            why_fixed = SEEDED
        others = (other for other in self._loaders.values() if other is not loader)
        may_try = not why_fixed and all(other.trials.trial is None for other in others)
        change = loader.trials.add(measurement, room, begins=_begins(measurement), may_try=may_try)
        if change is not None:
            self._say(changed(name, change))
        if not why_fixed and measurement.persists:
            why_fixed = PERSISTS
        loader.is_fixed = bool(why_fixed)
        if why_fixed and not loader.is_advised:
            forecast = loader.trials.forecast(room)
            if forecast is not None and forecast.gain >= _SURE:
                loader.is_advised = True
                self._say(advised(name, forecast, why_fixed))

    def _room(self, loader: _Loader) -> Budget:
        """What is left by the loaders that have workers at the same time."""
        others = (other for other in self._loaders.values() if other is not loader and other.group == loader.group)
        taken = sum(other.trials.workers for other in others)
        return replace(self._budget, workers=max(self._budget.workers - taken, 0))


def _begins(measurement: Measurement) -> Interval:
    """When all ranks know the decision that follows from it: some of them have begun the next interval already."""
    took_s = measurement.batches * measurement.step_s
    now = measurement.interval
    if now.part or took_s >= INTERVAL_S / 2:
        return Interval(now.epoch, now.part + 2)
    return Interval(now.epoch + (1 if took_s >= _LONG_S else 2), 1)


def changed(name: str, change: TrialOutcome) -> str:
    """How a trial ended, for the user."""
    now, other = f"num_workers={change.now.workers}", f"num_workers={change.other.workers}"
    now_s, other_s = time_words(change.now.step_s), time_words(change.other.step_s)
    if change.kind == "kept":
        share = share_words(change.other.wait_s / change.other.step_s)
        return (
            f"{name}: {now} instead of {change.other.workers} from now on: a step takes {now_s} instead of {other_s}, "
            f"of which {share} was waiting for data"
        )
    if change.kind == "no gain":
        return f"{name}: {now} stays: {other} was tried once, and a step took {other_s} instead of {now_s}"
    return (
        f"{name}: {now} again: with {other} a step now takes {other_s}; it took {now_s} before. It is not tried again"
    )


def advised(name: str, forecast: Forecast, why_fixed: str) -> str:
    """What more workers would gain where nothing is changed, for the user."""
    known = forecast.known
    return (
        f"{name}: {share_words(known.wait_s / known.step_s)} of each step of {time_words(known.step_s)} is waiting for "
        f"data; num_workers={forecast.workers} instead of {known.workers} would bring it to "
        f"{time_words(forecast.step_s)}. It is not changed: {why_fixed}"
    )
