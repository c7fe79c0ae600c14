"""One rank's part in fitting loaders: it measures its own, and sets them to what rank 0 has decided for all.

Ranks meet over the exchange, on a thread of the tuner's own; the training thread waits for nobody but once, for the
budget, before the first loader is used.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning_ncclsafe import codec
from lightning_ncclsafe.capacity_facts import Capacity
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.loaders.endings import Begin
from lightning_ncclsafe.loaders.tuning import words
from lightning_ncclsafe.loaders.tuning.agreed_budget import BUDGET_S, agree_on_budget
from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.choice import Choice
from lightning_ncclsafe.loaders.tuning.deciding import Deciding
from lightning_ncclsafe.loaders.tuning.fitted import Fitted, kind_of
from lightning_ncclsafe.loaders.tuning.messages import AllMeasured, Decision, Setting
from lightning_ncclsafe.probes.cgroups import ControlGroups
from lightning_ncclsafe.reporter import say_on_stderr, say_own_failure
from lightning_ncclsafe.settings import TunerSettings

Tuning = Callable[[Begin], Any]
"""Makes the iterator of an epoch, from a function that begins the loader's own."""

# The store serves all ranks' polls: at most about a thousand a second in all.
_POLLS_PER_S, _POLL_S, _SETTLED_POLL_S = 1000.0, 0.25, 2.0
_JOIN_S = 5.0
_DECISION = "tuning/decision"


class Tuner:
    """Fits the loaders of one call of the Trainer, on one rank.

    Args:
        settings: What the user has set.
        exchange: What the ranks share.
        rank: Global rank.
        world_size: Number of ranks.
        capacity: What this rank may use of its host.
        say: Prints a line to the user.
    """

    def __init__(
        self,
        settings: TunerSettings,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        capacity: Capacity,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self._settings = settings
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._capacity = capacity
        self._say = say
        self._budget: Budget | None = None
        self._has_budget = threading.Event()
        self._lock = threading.Lock()
        """Of the loaders, between the training thread and the tuner's."""
        self._fitted: dict[str, Fitted] = {}
        self._epochs: Counter[str] = Counter()
        self._deciding: Deciding | None = None
        self._decision = Decision()
        self._published = b""
        self._wake, self._over = threading.Event(), threading.Event()
        self._groups = ControlGroups()
        self._thread = threading.Thread(target=self._run, name="ncclsafe-tuner", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # What the training thread calls.

    def take(self, stage: str, loaders: Sequence[Any], *, is_fit: bool) -> list[Tuning | None]:
        """The loaders of a stage are about to be used.

        Args:
            stage: Name of the hook that has given them, ``"train_dataloader"``.
            loaders: They.
            is_fit: Whether the Trainer fits, so that other loaders live at the same time.

        Returns:
            For each loader what makes its iterators, or None to leave it alone.
        """
        self.release(stage)
        if not self._has_budget.wait(2 * BUDGET_S) or self._over.is_set():
            return [None] * len(loaders)
        names = [stage if len(loaders) == 1 else f"{stage}[{index}]" for index in range(len(loaders))]
        self._name_excess(stage, loaders)
        tunings = [self._take(name, loader, is_fit=is_fit) for name, loader in zip(names, loaders, strict=True)]
        self._wake.set()
        return tunings

    def release(self, stage: str) -> None:
        """A stage's loaders are used no more, or are about to be given again."""
        with self._lock:
            gone = [name for name in self._fitted if name.partition("[")[0] == stage]
            loaders = [self._fitted.pop(name) for name in gone]
        for loader in loaders:
            loader.close()

    def close(self) -> None:
        """Ends the thread and all workers; nothing is left behind."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        for stage in {name.partition("[")[0] for name in [*self._fitted]}:
            self.release(stage)

    def _take(self, name: str, loader: Any, *, is_fit: bool) -> Tuning | None:
        assert self._budget is not None
        kind = kind_of(loader, self._settings)
        if kind is None:
            return None
        start = _start(loader, kind, self._budget.workers)
        with self._lock:
            if self._deciding is not None:
                start = self._deciding.begin(
                    name,
                    start,
                    asked=words.setting_words(loader.num_workers, loader.prefetch_factor or 0),
                    is_fit=is_fit,
                    advises=kind.advises,
                    iterable=kind.iterable,
                    copies=2 if getattr(loader, "pin_memory", False) else 1,
                )
            known = self._setting_of(name)
            if known is not None and not kind.iterable:
                start = Choice(workers=known.workers, prefetch=known.prefetch)
            own = kind(loader, start, say=lambda text: self._say(f"{name}: {text}"), throttled_s=self._throttled_s)
            self._fitted[name] = own

        def begin(begin_own: Begin) -> Any:
            return own.begin(begin_own, self._setting_from_now_on(name) if kind.iterable else None)

        return begin

    def _name_excess(self, stage: str, loaders: Sequence[Any]) -> None:
        assert self._budget is not None
        asked = sum(getattr(loader, "num_workers", 0) for loader in loaders)
        if self._rank == 0 and asked > max(self._budget.workers, 0):
            self._say(words.over_budget(stage, asked, self._budget))

    def _setting_of(self, name: str) -> Setting | None:
        return next((setting for setting in self._decision.settings if setting.loader == name), None)

    def _setting_from_now_on(self, name: str) -> Setting | None:
        """For data whose number of batches depends on it: the same epoch on all ranks, so rank 0 is asked each time."""
        if self._deciding is not None:
            with self._lock:
                self._deciding.began_epoch(name)
        self._epochs[name] += 1
        with suppress(ExchangeError):
            self._read_decision()
        setting = self._setting_of(name)
        return setting if setting is not None and self._epochs[name] >= setting.from_epoch else None

    def _throttled_s(self) -> float | None:
        throttling = self._groups.throttling()
        return None if throttling is None else throttling.throttled_s

    # What the thread does.

    def _run(self) -> None:
        try:
            self._agree()
            poll_s = max(_POLL_S, self._world_size / _POLLS_PER_S)
            while not self._over.is_set():
                self._wake.wait(poll_s if not self._decision.settled else max(poll_s, _SETTLED_POLL_S))
                self._wake.clear()
                # One that has missed a deadline may answer the next time.
                with suppress(ExchangeError):
                    self._turn()
        except Exception as error:
            say_own_failure(error, what="the tuning of loaders")
        finally:
            self._over.set()
            self._has_budget.set()

    def _agree(self) -> None:
        """Once; training waits for this."""
        self._budget = agree_on_budget(
            self._exchange, self._capacity, rank=self._rank, world_size=self._world_size, over=self._over
        )
        if self._budget is None:
            self._over.set()
        elif self._rank == 0:
            self._deciding = Deciding(self._budget, self._world_size, self._say)
        self._has_budget.set()

    def _turn(self) -> None:
        with self._lock:
            loaders = dict(self._fitted)
        for loader in loaders.values():
            loader.look()
        found = (loader.measured(name) for name, loader in loaders.items())
        measured = AllMeasured(loaders=tuple(each for each in found if each is not None))
        if self._deciding is not None:
            self._decide(measured)
        else:
            self._publish(f"tuning/measured/{self._rank}", measured)
            self._read_decision()
        for name, loader in loaders.items():
            setting = self._setting_of(name)
            if setting is not None:
                loader.resize(setting)

    def _decide(self, own: AllMeasured) -> None:
        deciding = self._deciding
        assert deciding is not None
        keys = {f"tuning/measured/{rank}": rank for rank in range(1, self._world_size)}
        answers = self._exchange.get_many(keys) if keys else {}
        with self._lock:
            deciding.add(0, own)
            for key, answer in answers.items():
                deciding.add(keys[key], codec.decode(AllMeasured, answer))
            self._decision = deciding.decide()
        self._publish(_DECISION, self._decision)

    def _publish(self, key: str, message: Any) -> None:
        encoded = codec.encode(message)
        if encoded != self._published:
            self._exchange.set(key, encoded)
            self._published = encoded

    def _read_decision(self) -> None:
        if self._deciding is None:
            found = self._exchange.get_many([_DECISION])
            if found:
                self._decision = codec.decode(Decision, found[_DECISION])


def _start(loader: Any, kind: type[Fitted], most_workers: int) -> Choice:
    """What a loader begins with, on every rank alike: one worker, by which it is measured."""
    if not kind.iterable:
        return Choice(workers=min(1, most_workers), prefetch=2 if most_workers else 0)
    workers = min(loader.num_workers, most_workers)
    return Choice(workers=workers, prefetch=loader.prefetch_factor or 2 if workers else 0)
