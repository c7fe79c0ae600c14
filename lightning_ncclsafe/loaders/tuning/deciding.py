"""Rank 0's part: from the measures of all ranks, one setting for each loader, the same on all."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_ncclsafe.loaders.tuning import words
from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.messages import AllMeasured, Decision, Setting
from lightning_ncclsafe.loaders.tuning.observing import STRETCH_S
from lightning_ncclsafe.loaders.tuning.stretches import Moment, Stretch, worst_of
from lightning_ncclsafe.loaders.tuning.trials import Room, Trials

# Stretches that are kept of a rank until all ranks have measured them.
_KEPT = 32
_NEVER = Moment(0)
# Ranks ask for what was decided every quarter of a second: they have it before an epoch of so long is over.
_LONG_S = 5.0


@dataclass(kw_only=True)
class _Loader:
    """What is known of one loader.

    Attributes:
        group: Loaders with the same one are read at the same time.
        users: What the user has set, as far as there is room for it.
        why_fixed: Why it stays as it is, in words for the user, with what is to be done; empty if it does not.
        trials: Decides.
        stretches: What each rank has measured, by moment.
        seen: When the last stretch was measured that all ranks have.
        is_fixed: Whether it stays as it is.
        is_over: Whether it takes no settings on some rank any more.
        is_advised: Whether the user has been told what is to be gained.
    """

    group: str
    users: int
    why_fixed: str
    trials: Trials
    stretches: dict[int, dict[Moment, Stretch]] = field(default_factory=dict)
    seen: Moment = _NEVER
    is_fixed: bool = False
    is_over: bool = False
    is_advised: bool = False


class Deciding:
    """Decides for all loaders of one call of the Trainer.

    Args:
        budget: What the loaders of a rank may use together: the least of all ranks.
        world_size: Number of ranks.
        applies_to_seeded: Whether loaders of seeded runs are changed, too.
        say: Prints a line to the user.
    """

    def __init__(self, budget: Budget, world_size: int, *, applies_to_seeded: bool, say: Callable[[str], None]) -> None:
        self._budget = budget
        self._world_size = world_size
        self._applies_to_seeded = applies_to_seeded
        self._say = say
        self._loaders: dict[str, _Loader] = {}

    def begin(self, name: str, users: int, *, group: str, why_fixed: str, forks: bool) -> None:
        """A loader is about to be used, for the first time or again.

        Args:
            name: Its name.
            users: What the user has set, as far as there is room for it: what it begins with.
            group: Loaders with the same one have workers at the same time.
            why_fixed: Why it stays as it is, in words for the user; empty if it does not.
            forks: Whether its workers are forked, and so started at once.
        """
        known = self._loaders.get(name)
        if known is None or (known.users, known.why_fixed) != (users, why_fixed):
            trials = Trials(users, forks=forks)
            self._loaders[name] = _Loader(group=group, users=users, why_fixed=why_fixed, trials=trials)

    def add(self, rank: int, measured: AllMeasured) -> None:
        """Takes what a rank has published."""
        for window in measured.loaders:
            loader = self._loaders.get(window.loader)
            if loader is None:
                continue
            # It has had to go back on one rank, and will not be asked again.
            loader.is_over = loader.is_over or window.frozen
            own = loader.stretches.setdefault(rank, {})
            own.update((stretch.moment, stretch) for stretch in window.stretches if stretch.moment > loader.seen)
            for moment in sorted(own)[:-_KEPT]:
                del own[moment]

    def decide(self) -> Decision:
        """What all ranks are to set, from the next stretch on."""
        for name, loader in self._loaders.items():
            for stretch in self._complete(loader):
                self._consider(name, loader, stretch)
        settings = (
            Setting(
                loader=name,
                users=loader.users,
                workers=loader.trials.workers,
                trial=None if loader.is_over else loader.trials.trial,
            )
            for name, loader in self._loaders.items()
            if not loader.why_fixed
        )
        is_settled = all(loader.is_fixed or loader.is_over for loader in self._loaders.values())
        return Decision(settings=tuple(settings), settled=is_settled)

    def _complete(self, loader: _Loader) -> list[Stretch]:
        """What all ranks have measured since the last time, with the same workers."""
        ranks = loader.stretches
        if len(ranks) < self._world_size:
            return []
        moments = sorted(set.intersection(*(set(own) for own in ranks.values())))
        found = [worst_of([own.pop(moment) for own in ranks.values()]) for moment in moments]
        loader.seen = max([loader.seen, *moments])
        return [stretch for stretch in found if stretch is not None]

    def _consider(self, name: str, loader: _Loader, stretch: Stretch) -> None:
        if loader.is_over:
            return
        room = self._room(loader)
        why_fixed = loader.why_fixed
        if not why_fixed and stretch.seeded and not self._applies_to_seeded:
            why_fixed = words.SEEDED
        others = (other for other in self._loaders.values() if other is not loader)
        change = loader.trials.add(
            stretch,
            room,
            begins=_begins(stretch),
            may_try=not why_fixed and all(other.trials.trial is None for other in others),
        )
        if change is not None:
            self._say(words.changed(name, change))
        if not why_fixed and stretch.persists:
            why_fixed = words.PERSISTS
        loader.is_fixed = bool(why_fixed)
        if why_fixed and not loader.is_advised:
            self._advise(name, loader, room, why_fixed)

    def _advise(self, name: str, loader: _Loader, room: Room, why_fixed: str) -> None:
        promise = loader.trials.promise(room)
        if promise is not None and loader.trials.is_sure(promise):
            loader.is_advised = True
            self._say(words.advised(name, promise, why_fixed))

    def _room(self, loader: _Loader) -> Room:
        """What the loaders leave that have workers at the same time."""
        others = (other for other in self._loaders.values() if other is not loader and other.group == loader.group)
        return Room(
            workers=max(self._budget.workers - sum(other.trials.workers for other in others), 0),
            cores=self._budget.cores,
            memory_bytes=self._budget.memory_bytes,
        )


def _begins(stretch: Stretch) -> Moment:
    """When all ranks have read what follows from a stretch: the next one has begun already, on some of them."""
    took_s = stretch.batches * stretch.step_s
    if stretch.part or took_s >= STRETCH_S / 2:
        return Moment(stretch.epoch, stretch.part + 2)
    return Moment(stretch.epoch + (1 if took_s >= _LONG_S else 2), 1)
