"""Rank 0's part: from the measures of all ranks, one setting for each loader, the same on all."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from lightning_ncclsafe.loaders.tuning import words
from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.choice import Choice
from lightning_ncclsafe.loaders.tuning.controller import Controller
from lightning_ncclsafe.loaders.tuning.measures import Measures, worst_of
from lightning_ncclsafe.loaders.tuning.messages import AllMeasured, Decision, Measured, Setting

# A rank that measures more slowly, or not at all, is waited for this long after the first: it may have ended its data.
_PATIENCE_S = 3.0


@dataclass(kw_only=True)
class _Loader:
    """What is known of one loader.

    Attributes:
        group: Loaders with another group have workers in turn with it; see :class:`~.room.Room`.
        fixed_workers: Workers that it has whatever is decided; None where that is decided.
        controller: Decides.
        asked: What the user has set, in words.
        used: Number of the last window of each rank that was decided on.
        last: What was measured last.
        told: What was last said of it.
        is_over: Whether it takes no settings on some rank any more.
        since: When the first rank's window came that has not been decided on, by ``time.monotonic()``.
    """

    group: str
    fixed_workers: int | None
    controller: Controller
    asked: str
    used: dict[int, int] = field(default_factory=dict)
    last: Measures | None = None
    told: Choice | None = None
    since: float | None = None
    is_over: bool = False


class Deciding:
    """Decides for all loaders of one call of the Trainer.

    Args:
        budget: What the loaders of a rank may use together: the least of all ranks.
        world_size: Number of ranks.
        say: Prints a line to the user.
    """

    def __init__(self, budget: Budget, world_size: int, say: Callable[[str], None]) -> None:
        self._budget = budget
        self._world_size = world_size
        self._say = say
        self._loaders: dict[str, _Loader] = {}
        self._windows: dict[str, dict[int, Measured]] = {}

    def begin(
        self, name: str, start: Choice, *, asked: str, group: str, fixed_workers: int | None, copies: int, forks: bool
    ) -> Choice:
        """A loader is about to be used, for the first time or again.

        Args:
            name: Its name.
            start: What it is to begin with.
            asked: What the user has set, in words.
            group: Loaders with the same one have workers at the same time.
            fixed_workers: Workers that it has whatever is decided, as its setting is only advised; None otherwise.
            copies: How often a batch that is ready is held in memory: 2 where it is pinned.
            forks: Whether its workers are forked, and so started at once.

        Returns:
            What it begins with: what was found for it before, if it was used before.
        """
        known = self._loaders.get(name)
        if known is None or known.fixed_workers != fixed_workers:
            known = _Loader(
                group=group,
                fixed_workers=fixed_workers,
                controller=Controller(self._budget, start, copies=copies, forks=forks),
                asked=asked,
            )
            self._loaders[name] = known
            self._share()
        return known.controller.choice

    def add(self, rank: int, measured: AllMeasured) -> None:
        """Takes what a rank has published."""
        for window in measured.loaders:
            known = self._loaders.get(window.loader)
            if known is not None and window.frozen:
                # It has had to go back on one rank, and will not be asked again.
                known.is_over = True
            self._windows.setdefault(window.loader, {})[rank] = window

    def decide(self) -> Decision:
        """What all ranks are to set, now."""
        for name, loader in self._loaders.items():
            measures = None if loader.is_over else self._complete(name, loader)
            if measures is not None:
                self._decide(name, loader, measures)
        return Decision(settings=tuple(self._settings()), settled=self._is_settled())

    def close(self) -> None:
        """Says what was in force where the data ended before anything was settled."""
        for name, loader in self._loaders.items():
            if loader.told is None and loader.last is not None and not loader.is_over:
                self._tell(name, loader, loader.last, is_tried=True)

    def _is_settled(self) -> bool:
        return all(loader.is_over or loader.controller.settled for loader in self._loaders.values())

    def _settings(self) -> Iterable[Setting]:
        for name, loader in self._loaders.items():
            if loader.fixed_workers is None:
                choice = loader.controller.choice
                yield Setting(loader=name, workers=choice.workers, prefetch=choice.prefetch)

    def _complete(self, name: str, loader: _Loader) -> Measures | None:
        """The worst of what ranks have measured since the last decision, with the setting that is in force."""
        fresh = [
            (rank, window)
            for rank, window in self._windows.get(name, {}).items()
            if window.number > loader.used.get(rank, 0) and _is_with(window.measures, loader)
        ]
        if not fresh:
            return None
        now = time.monotonic()
        loader.since = loader.since or now
        if len(fresh) < self._world_size and now - loader.since < _PATIENCE_S:
            return None
        loader.since = None
        loader.used.update((rank, window.number) for rank, window in fresh)
        return worst_of([window.measures for _, window in fresh])

    def _decide(self, name: str, loader: _Loader, measures: Measures) -> None:
        loader.last = measures
        self._share()
        controller = loader.controller
        was_settled = controller.settled
        changed = controller.add(measures)
        if not controller.settled or (was_settled and changed is None):
            return
        if loader.told is None or _differ(loader.told, controller.choice):
            self._tell(name, loader, measures)

    def _tell(self, name: str, loader: _Loader, measures: Measures, *, is_tried: bool = False) -> None:
        choice, before = loader.controller.choice, loader.told
        loader.told = choice
        budget = self._left_for(loader)
        if loader.fixed_workers is not None:
            self._say(words.advised(name, choice, measures, budget, asked=loader.asked))
        elif before is None:
            self._say(words.chosen(name, choice, measures, budget, asked=loader.asked, is_tried=is_tried))
        else:
            self._say(words.changed(name, before, choice, loader.controller.reason))

    def _share(self) -> None:
        """What a loader may use is what the others leave."""
        for loader in self._loaders.values():
            loader.controller.budget = self._left_for(loader)

    def _left_for(self, loader: _Loader) -> Budget:
        """What the loaders leave that have workers at the same time: those of its group, and those that stay."""
        others = [other for other in self._loaders.values() if other is not loader and _is_with_it(other, loader)]
        workers = self._budget.workers - sum(map(_workers, others))
        return replace(
            self._budget,
            workers=max(workers, 0),
            memory_bytes=_less(self._budget.memory_bytes, sum(map(_memory_bytes, others))),
            shm_bytes=_less(self._budget.shm_bytes, sum(map(_in_flight_bytes, others))),
            open_files=_less(self._budget.open_files, sum(map(_open_files, others))),
        )


def _is_with_it(other: _Loader, loader: _Loader) -> bool:
    return other.group == loader.group or bool(other.fixed_workers)


def _workers(loader: _Loader) -> int:
    return loader.controller.choice.workers if loader.fixed_workers is None else loader.fixed_workers


def _is_with(measures: Measures, loader: _Loader) -> bool:
    choice = loader.controller.choice
    return loader.fixed_workers is not None or (measures.workers, measures.prefetch) == (
        choice.workers,
        choice.prefetch,
    )


def _differ(one: Choice, other: Choice) -> bool:
    return (one.workers, one.prefetch) != (other.workers, other.prefetch)


def _in_flight_bytes(loader: _Loader) -> int:
    choice = loader.controller.choice
    return 0 if loader.last is None else choice.workers * choice.prefetch * loader.last.batch_bytes


def _memory_bytes(loader: _Loader) -> int:
    workers = 0 if loader.last is None else loader.controller.choice.workers * loader.last.worker_bytes
    return workers + _in_flight_bytes(loader)


def _open_files(loader: _Loader) -> int:
    choice = loader.controller.choice
    return 0 if loader.last is None else choice.workers * choice.prefetch * loader.last.tensors


def _less(most: int | None, used: int) -> int | None:
    return None if most is None else max(most - used, 0)
