"""One rank's part in tuning loaders: it measures its own and sets them to what rank 0 decides for all.

Ranks communicate over the exchange, on a thread of the tuner's own. The training thread waits only once, for the
budget, before the first loader is used.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_ncclsafe._torch import loading
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.exchange import Exchange, ExchangeError, comes_first, wait_for_keys
from lightning_ncclsafe.facts import Capacity, codec
from lightning_ncclsafe.loaders.iteration import Begin
from lightning_ncclsafe.loaders.tuning.budget import BUDGET_S, Budget, agree_on_budget, fewer_ahead, fewer_workers
from lightning_ncclsafe.loaders.tuning.deciding import (
    ADVICE_ONLY,
    ITERABLE,
    OWN_WAY,
    Deciding,
    Decision,
    LoaderReport,
    LoaderSetting,
)
from lightning_ncclsafe.loaders.tuning.eligibility import forks
from lightning_ncclsafe.loaders.tuning.kinds import AdvisedLoader, LoaderOptions, kind_of
from lightning_ncclsafe.loaders.tuning.measuring import BatchSize, Interval
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.settings import TunerSettings

Tuning = Callable[[Begin], Any]
"""Creates the iterator of an epoch, from a function that begins the loader's own."""
# The store serves all ranks' polls: at most about a thousand a second in all.
_POLLS_PER_S, _POLL_S, _SETTLED_POLL_S = 1000.0, 0.25, 2.0
_JOIN_S = 5.0
# How long ranks wait for rank 0 when an epoch of a tuned iterable dataset begins.
_EPOCH_S, _EPOCH_POLL_S = 10.0, 0.002
_DECISION = "tuning/decision"


class Tuner:
    """Tunes the loaders of one call of the Trainer, on one rank."""

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
        self._loaders: dict[str, AdvisedLoader] = {}
        self._epochs: Counter[str] = Counter()
        """Of loaders that have been released."""
        self._of_epoch: dict[str, int] = {}
        self._printed: set[str] = set()
        self._deciding: Deciding | None = None
        self._decision = Decision()
        self._published = b""
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclsafe-tuner", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # What the training thread calls.

    def take(self, stage: str, loaders: Sequence[Any], *, at_once: bool = True) -> list[Tuning | None]:
        """Takes charge of the loaders of a stage, which are about to be used.

        Args:
            stage: Name of the hook that returned them, ``"train_dataloader"``.
            at_once: Whether they are read at the same time; loaders of different stages never are.

        Returns:
            For each loader what creates its iterators, or None to leave it alone.
        """
        self.release(stage)
        budget = self._await_budget()
        if budget is None or self._over.is_set():
            return [None] * len(loaders)
        names = [stage if len(loaders) == 1 else f"{stage}[{index}]" for index in range(len(loaders))]
        together = loaders if at_once else loaders[:1]
        asked = sum(getattr(loader, "num_workers", 0) for loader in together)
        most = budget.most_asked
        share = most if asked <= most else max(most // len(together), 1)
        return [
            self._take(name, loader, budget, most_workers=share, group=stage if at_once else name)
            for name, loader in zip(names, loaders, strict=True)
        ]

    def release(self, stage: str) -> None:
        """Restores a stage's loaders, which are no longer used, or are about to be taken again."""
        with self._lock:
            # In reverse order: a loader of two stages is set back to what it was before the first.
            gone = [name for name in reversed(self._loaders) if _stage_of(name) == stage]
            loaders = [self._loaders.pop(name) for name in gone]
        for name, loader in zip(gone, loaders, strict=True):
            loader.close()
            self._epochs[name] = loader.epochs

    def close(self) -> None:
        """Ends the thread and all workers."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        while self._loaders:
            self.release(_stage_of([*self._loaders][-1]))

    @marked(Mark.STORE)
    def _await_budget(self) -> Budget | None:
        return self._budget if self._has_budget.wait(2 * BUDGET_S) else None

    def _take(self, name: str, loader: Any, budget: Budget, *, most_workers: int, group: str) -> Tuning | None:
        kind = kind_of(loader, self._settings)
        if kind is None:
            return None
        asked = loader.num_workers
        workers = asked if kind is AdvisedLoader else min(asked, most_workers)
        if workers < asked and self._rank == 0:
            self._print_once(fewer_workers(name, asked, workers, budget))
        why_fixed = ""
        if kind is AdvisedLoader:
            own_way = ITERABLE if loading.has_iterable_dataset(loader) else OWN_WAY
            why_fixed = own_way if self._settings.apply else ADVICE_ONLY
        with self._lock:
            if self._deciding is not None:
                self._deciding.begin(name, workers, group=group, why_fixed=why_fixed, forks=forks(loader))
            options = LoaderOptions(
                user_workers=workers,
                epochs=self._epochs[name],
                most_ahead=lambda size: self._most_ahead(name, loader, workers, size, budget),
                workers_of_epoch=partial(self._workers_of_epoch, name),
                say=partial(self._say_first, name),
                measured=self._wake.set,
            )
            own = self._loaders[name] = kind(loader, options)
            own.setting = self._setting_of(name, own)
        return own.begin

    def _most_ahead(self, name: str, loader: Any, workers: int, size: BatchSize, budget: Budget) -> int | None:
        """How many batches a loader may have ahead; all loaders of the rank get equal shares of the budget."""
        found = budget.most_batches(size.size_bytes, size.tensors, copies=2 if loader.pin_memory else 1)
        if not found:
            return None
        bound = min(found, key=found.__getitem__)
        most = max(found[bound] // max(len(self._loaders), 1), 1)
        asked = workers * (loader.prefetch_factor or 2)
        if most < asked and self._rank == 0:
            self._print_once(fewer_ahead(name, asked, most, size.size_bytes, bound, budget), about=name)
        return most

    def _print_once(self, line: str, about: str = "") -> None:
        if (about or line) not in self._printed:
            self._printed.add(about or line)
            self._say(line)

    @marked(Mark.STORE)
    def _say_first(self, name: str, text: str) -> None:
        """Prints a line if no other rank has: what happens to the workers of one rank mostly happens on all."""
        if comes_first(self._exchange, f"tuning/said/{name}", self._rank):
            self._say(f"rank {self._rank}: {name}: {text}")

    def _setting_of(self, name: str, loader: AdvisedLoader) -> LoaderSetting | None:
        """The decision on a loader, unless it was made for an earlier one of its name with another ``num_workers``."""
        found = (setting for setting in self._decision.settings if setting.loader == name)
        return next((setting for setting in found if setting.user_workers == loader.user_workers), None)

    @marked(Mark.STORE)
    def _workers_of_epoch(self, name: str, loader: AdvisedLoader) -> int | None:
        """The workers of all ranks in the epoch that begins, where the number of batches may depend on them.

        Rank 0 decides when it begins the epoch, and the others wait for that. A rank that has waited for too long
        decides for all that nothing changes.
        """
        epoch = loader.epochs + 1
        key = f"tuning/epoch/{name}/{epoch}"
        found, workers = dict[str, bytes](), None
        try:
            if self._deciding is None:
                found = wait_for_keys(self._exchange, [key], deadline_s=_EPOCH_S, poll_s=_EPOCH_POLL_S)
            else:
                # No rank is two epochs behind, so the store does not grow with the epochs.
                self._exchange.delete([f"tuning/epoch/{name}/{epoch - 2}"])
                workers = loader.workers_at(Interval(epoch))
            agreed = json.loads(found.get(key) or self._exchange.set_if_absent(key, json.dumps(workers).encode()))
            if isinstance(agreed, int):
                self._of_epoch[name] = agreed
        except ExchangeError as error:
            say_own_failure(error, what=f"the tuning of {name}")
        return self._of_epoch.get(name)

    # What the thread does.

    def _run(self) -> None:
        try:
            self._agree()
            poll_s = max(_POLL_S, self._world_size / _POLLS_PER_S)
            while not self._over.is_set():
                self._wake.wait(poll_s if not self._decision.settled else max(poll_s, _SETTLED_POLL_S))
                self._wake.clear()
                # A store that has missed a deadline may answer the next time.
                with suppress(ExchangeError):
                    self._turn()
        except Exception as error:
            say_own_failure(error, what="the tuning of loaders")
        finally:
            self._over.set()
            self._has_budget.set()

    def _agree(self) -> None:
        """Agrees on the budget; training waits for this once."""
        self._budget = agree_on_budget(
            self._exchange, self._capacity, rank=self._rank, world_size=self._world_size, over=self._over
        )
        if self._budget is None:
            self._over.set()
            return
        if self._rank == 0:
            to_seeded = self._settings.apply_to_seeded
            self._deciding = Deciding(self._budget, self._world_size, applies_to_seeded=to_seeded, say=self._say)
        # If a rank takes no part, its loaders stay as they are, and those of iterable datasets must not differ.
        if not self._budget.all_ranks:
            self._settings = replace(self._settings, apply_to_iterables=False)
        self._has_budget.set()

    def _turn(self) -> None:
        with self._lock:
            loaders = dict(self._loaders)
        measured = tuple(loader.measured(name) for name, loader in loaders.items())
        if self._deciding is not None:
            self._decide(self._deciding, measured)
        else:
            self._publish(f"tuning/measured/{self._rank}", measured)
            if found := self._exchange.get_many([_DECISION]):
                self._decision = codec.decode(Decision, found[_DECISION])
        for name, loader in loaders.items():
            loader.setting = self._setting_of(name, loader)

    def _decide(self, deciding: Deciding, own: tuple[LoaderReport, ...]) -> None:
        keys = {f"tuning/measured/{rank}": rank for rank in range(1, self._world_size)}
        answers = self._exchange.get_many(keys) if keys else {}
        with self._lock:
            deciding.add(0, own)
            for key, answer in answers.items():
                deciding.add(keys[key], codec.decode(tuple[LoaderReport, ...], answer))
            decision = deciding.decide()
        self._publish(_DECISION, decision)
        self._decision = decision

    def _publish(self, key: str, message: Any) -> None:
        encoded = codec.encode(message)
        if encoded != self._published:
            self._exchange.set(key, encoded)
            self._published = encoded


def _stage_of(name: str) -> str:
    return name.partition("[")[0]
