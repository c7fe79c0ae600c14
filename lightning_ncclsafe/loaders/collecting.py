"""Collects the loaders of a stage as Lightning prepares them; once complete, they are compared between ranks and tuned.

The Trainer and its loops are used by duck type; Lightning is not imported here.
"""

import sys
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from lightning_ncclsafe._torch import process_groups, sent_together
from lightning_ncclsafe.code.own_work import OwnWork
from lightning_ncclsafe.code.patching import Replacements
from lightning_ncclsafe.errors import CollectiveTimeoutError, DatasetMismatchError, HostPreflightError
from lightning_ncclsafe.facts import VOTE_AHEAD_GROUP, VOTE_GROUP, VOTE_GROUPS, DataFacts, EpochEnd, LoaderFacts
from lightning_ncclsafe.loaders.agreement import Agreement
from lightning_ncclsafe.loaders.iteration import Begin, Iterate, LoaderProxy, ReplacedIteration, replaceable
from lightning_ncclsafe.loaders.lockstep import BatchesRead, Lockstep, until
from lightning_ncclsafe.loaders.tuning.tuner import Tuner, Tuning
from lightning_ncclsafe.probes.data.data_line import data_line
from lightning_ncclsafe.probes.data.loaders import loader_facts
from lightning_ncclsafe.probes.data.random_state import random_states
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.setting_lines import setting_line
from lightning_ncclsafe.probes.trainer.state import settings_of
from lightning_ncclsafe.report.terminal import say_own_failure
from lightning_ncclsafe.rules.kit.activity import AGREEMENT
from lightning_ncclsafe.rules.kit.data import TRAIN
from lightning_ncclsafe.settings import BACKSTOP_S, AgreementSettings

_CONNECT_S = 30.0


@dataclass(kw_only=True)
class Stage:
    """The loaders that one of Lightning's hooks returned.

    Attributes:
        name: Name of the hook, ``"train_dataloader"``.
        mode: How Lightning combines the loaders.
        source: What has the hook, or the loaders themselves.
        expected: Number of loaders.
        loaders: Those that Lightning has prepared so far.
    """

    name: str
    mode: str = ""
    source: Any = None
    expected: int = 1
    loaders: list[Any] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether Lightning has prepared them all."""
        return len(self.loaders) >= self.expected

    def facts(self, trainer: Any, strategy: Any, settings: AgreementSettings) -> DataFacts:
        """What this rank shares about the stage."""
        limit = self._limit(trainer)
        given = [getattr(loader, "wrapped_loader", loader) for loader in self.loaders]
        # An empty list in place of a loader: Lightning takes it for one that has no batches.
        is_none = all(isinstance(loader, (list, tuple, dict)) and not loader for loader in given)
        loaders = tuple(
            loader_facts(
                loader,
                name=self.name if len(given) == 1 else f"{self.name}[{index}]",
                limit=limit,
                content=settings.content,
            )
            for index, loader in enumerate(() if is_none else given)
        )
        share = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return DataFacts(
            stage=self.name,
            mode=self.mode,
            loaders=loaders,
            settings=settings_of(trainer),
            val_check_batch=self._val_check_batch(trainer, loaders) if self.name == TRAIN else None,
            data_rank=int(share.get("rank", strategy.global_rank)),
            data_ranks=int(share.get("num_replicas", strategy.world_size)),
            random=random_states(),
            forward_communicates=getattr(strategy, "forward_communicates", False)
            or sent_together.sends_buffers(getattr(strategy, "model", None)),
            on_mismatch=settings.on_mismatch,
            content=settings.content,
            on_uneven=settings.on_uneven,
        )

    def most_batches(self, trainer: Any) -> int | None:
        """The number of batches of a loader after which Lightning stops, if it is the same for each loader."""
        limit = self._limit(trainer)
        alone = len(self.loaders) == 1 or self.mode == "sequential"
        return limit if alone and isinstance(limit, int) else None

    def _limit(self, trainer: Any) -> int | float | None:
        limit: int | float | None = getattr(trainer, f"limit_{self.name.partition('_')[0]}_batches", None)
        return limit

    def _val_check_batch(self, trainer: Any, loaders: tuple[LoaderFacts, ...]) -> int | None:
        """As in Lightning's ``_FitLoop.setup_data``."""
        interval = getattr(trainer, "val_check_interval", None)
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            return None
        if isinstance(interval, int):
            return interval
        known = [loader.batches for loader in loaders if loader.batches is not None]
        if not known or len(known) < len(loaders) or not isinstance(interval, float):
            return None
        batches = min(known) if self.mode == "min_size" else max(known)
        return max(1, int(batches * interval))


class LoaderCollector:
    """Compares, tunes and iterates the loaders of every stage of one call of the Trainer, on one rank.

    Args:
        agreement: Compares them with those of the other ranks; None with one rank.
        combined: Lightning's ``CombinedLoader``, which flattens lists, dicts and other containers of loaders.
        timeout_s: The run's hard limit, seconds.
        tuner: Tunes them; None to leave them as they are.
        on_stage: Called on all ranks with the loaders of a stage, before anything else.
    """

    def __init__(
        self,
        *,
        trainer: Any,
        strategy: Any,
        agreement: Agreement | None,
        settings: AgreementSettings,
        combined: type,
        tracker: ActionTracker,
        timeout_s: float,
        tuner: Tuner | None = None,
        on_stage: Callable[[Stage], None] = lambda _: None,
    ) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._agreement = agreement
        self._settings = settings
        self._combined = combined
        self._tracker = tracker
        self._timeout_s = timeout_s
        self._tuner = tuner
        self._on_stage = on_stage
        self._stage: Stage | None = None
        self._stages: dict[str, Stage] = {}
        """Those whose loaders are iterated for them, by name."""
        self._methods = Replacements()
        self._replaced: list[tuple[str, ReplacedIteration]] = []
        """With their stages."""
        self._votes: dict[bool, process_groups.VoteGroup] = {}
        """By whether ranks vote one batch ahead."""
        self._is_off = False

    def attach(self) -> None:
        """Intercepts what the loops' hooks return: the number of loaders is not known otherwise."""

        def attach() -> None:
            for loop in self._loops():
                source = loop._data_source
                self._methods.wrap(source, "dataloader", partial(self._request, source))

        self._safely(attach)

    def detach(self) -> None:
        """Restores everything."""
        self._methods.undo()
        while self._replaced:
            self._replaced.pop()[1].restore()
        self._stages.clear()
        for looks_ahead in [*self._votes]:
            self._close_votes(looks_ahead)
        # The user's own loaders, where a proxy has taken their place.
        for combined in (loop._combined_loader for loop in self._loops()):
            loaders = [] if combined is None else combined.flattened
            if any(isinstance(loader, LoaderProxy) for loader in loaders):
                combined.flattened = [
                    loader.wrapped_loader if isinstance(loader, LoaderProxy) else loader for loader in loaders
                ]

    def _loops(self) -> tuple[Any, ...]:
        trainer = self._trainer
        fit = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
        return (*fit, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)

    def _request(self, source: Any, call_hook: Callable[[], Any]) -> Any:
        """Calls one of the loops' hooks for its loaders, which Lightning then prepares one by one."""
        loaders = call_hook()
        self._safely(lambda: self._open(source, loaders))
        return loaders

    def _open(self, source: Any, loaders: Any) -> None:
        name = source.name
        is_combined = isinstance(loaders, self._combined)
        mode = "max_size_cycle" if name == TRAIN else "sequential"
        combined = loaders if is_combined else self._combined(loaders, mode)
        given = getattr(source, "instance", None)
        self._stage = Stage(name=name, mode=combined._mode, source=given, expected=len(combined.flattened))
        if self._stage.is_complete:
            self._compare(self._stage)

    def prepared(self, loader: Any) -> Any:
        """Called when Lightning has prepared a loader; with the last one of a stage, ranks compare their loaders.

        Returns:
            What to iterate: the loader itself wherever possible.

        Raises:
            DatasetMismatchError: On all ranks, if they disagree.
        """
        # The same loader may be prepared again, for the next epochs or for another stage.
        self._release(loader=loader)
        loader = replaceable(loader)
        self._safely(lambda: self._add(loader))
        return loader

    def _add(self, loader: Any) -> None:
        # In a loop that Lightning's own hooks do not know, each loader is a separate stage.
        stage = self._stage or Stage(name="dataloader")
        stage.loaders.append(loader)
        if stage.is_complete:
            self._stage = None
            self._compare(stage)

    def _compare(self, stage: Stage) -> None:
        self._release(stage=stage.name)
        with self._tracker.action(f"{AGREEMENT}{stage.name}"), OwnWork():
            self._on_stage(stage)
            agreed = self._agreed(stage)
            for index, tuning in enumerate(self._tunings(stage)):
                end, iterate = agreed.get(index, (EpochEnd(), None))
                if iterate is not None or tuning is not None:
                    self._replace(stage, index, end, iterate, tuning)

    def _agreed(self, stage: Stage) -> dict[int, tuple[EpochEnd, Iterate]]:
        """Agrees with the other ranks on how to iterate the loaders that would not end together, by index.

        Raises:
            DatasetMismatchError: On all ranks, if they disagree.
        """
        agreement = self._agreement
        if self._is_off or agreement is None:
            return {}
        data = stage.facts(self._trainer, self._strategy, self._settings)
        set_at = partial(setting_line, self._trainer)
        ends = agreement.compare(data, partial(_line, stage, by_length=True), set_at)
        self._make_votes(agreement, {end.looks_ahead for end in ends if end.votes})
        agreed: dict[int, tuple[EpochEnd, Iterate]] = {}
        for index, end in enumerate(ends):
            facts = data.loaders[index]
            if not end.votes and not end.changes_nothing:
                agreed[index] = end, _counting(agreement, end, facts, data)
            elif end.votes and end.looks_ahead in self._votes:
                self._stages[stage.name] = stage
                ends_at = cache(partial(self._ends_at, stage.name, index))
                most = stage.most_batches(self._trainer)
                agreed[index] = end, self._voting(agreement, end, facts, data, most, ends_at)
        return agreed

    def _tunings(self, stage: Stage) -> list[Tuning | None]:
        try:
            if self._tuner is not None:
                return self._tuner.take(stage.name, stage.loaders, at_once=stage.mode != "sequential")
        except Exception as error:  # then the loaders stay as they are
            self._tuner = None
            say_own_failure(error, what="the tuning of loaders")
        return [None] * len(stage.loaders)

    def _replace(self, stage: Stage, index: int, end: EpochEnd, iterate: Iterate | None, tuning: Tuning | None) -> None:
        def begin_epoch(begin: Begin) -> Any:
            with OwnWork():
                tuned = begin if tuning is None else partial(tuning, begin)
                return tuned() if iterate is None else iterate(tuned)

        loader = stage.loaders[index]
        replaced = ReplacedIteration(loader, begin_epoch, length=end.length, hides_length=end.hides_length)
        self._replaced.append((stage.name, replaced))

    def _make_votes(self, agreement: Agreement, wanted: set[bool]) -> None:
        """Creates the groups that ranks vote on, where needed; either all ranks can use a group, or none does."""
        for looks_ahead in sorted(wanted - self._votes.keys()):
            try:
                self._votes[looks_ahead] = process_groups.VoteGroup(
                    VOTE_AHEAD_GROUP if looks_ahead else VOTE_GROUP,
                    timeout_s=self._timeout_s + BACKSTOP_S,
                    # Well before the guard would end the run, which can continue without votes.
                    connect_s=min(_CONNECT_S, self._timeout_s / 2),
                )
            except Exception as error:
                say_own_failure(error, what="the vote on a next batch")
            if not agreement.all_can(looks_ahead in self._votes):
                self._close_votes(looks_ahead)

    def _close_votes(self, looks_ahead: bool) -> None:
        votes = self._votes.pop(looks_ahead, None)
        if votes is not None:
            votes.close()

    def _safely(self, act: Callable[[], None]) -> None:
        """Acts; after a failure of our own, which is reported once, training continues and this rank compares no more.

        No rank waits for it then.
        """
        try:
            act()
        except (CollectiveTimeoutError, DatasetMismatchError, HostPreflightError):
            raise
        except Exception as error:
            self._is_off = True
            with suppress(Exception):
                if self._agreement is not None:
                    self._agreement.withdraw()
            say_own_failure(error, what="the comparison of the ranks' data")

    def _release(self, *, stage: str = "", loader: Any = None) -> None:
        """Restores the loaders that a stage had before, or one loader."""
        # In reverse order: a loader may be in a stage twice.
        self._stages.pop(stage, None)
        for name, replaced in [*reversed(self._replaced)]:
            if name == stage or replaced.loader is loader:
                self._replaced.remove((name, replaced))
                replaced.restore()

    def _ends_at(self, name: str, index: int) -> str:
        # By name: what iterates a loader outlives it until the garbage is collected, and would keep its workers.
        stage = self._stages.get(name)
        return _line(stage, [index]) if stage is not None else ""

    def _voting(
        self,
        agreement: Agreement,
        end: EpochEnd,
        facts: LoaderFacts,
        data: DataFacts,
        most: int | None,
        ends_at: Callable[[], str],
    ) -> Iterate:
        ahead = end.looks_ahead
        votes = self._votes[ahead]
        # Ranks that share a batch must evaluate the same data, too.
        has_peers = data.data_ranks < self._strategy.world_size
        compares = (data.stage == TRAIN or has_peers) and data.content != "off"
        first = [partial(agreement.first_batches, data, facts, votes)] if compares else []

        def report(readings: list[BatchesRead]) -> Exception:
            return agreement.uneven(data, facts, readings, ends_at())

        def place() -> int:
            # A path need not be text.
            return zlib.crc32(ends_at().encode(errors="backslashreplace"))

        def iterate(begin: Begin) -> Any:
            compare = first.pop() if first else None
            on_uneven = self._settings.on_uneven
            called = partial(process_groups.calls_besides, VOTE_GROUPS) if end.ends_independently else None
            return iter(
                Lockstep(
                    *(begin, votes, on_uneven, report, compare),
                    looks_ahead=ahead,
                    most=most,
                    called=called,
                    place=place,
                )
            )

        return iterate


def _line(stage: Stage, indices: Iterable[int], *, by_length: bool = False) -> str:
    """The line that decides how many batches these loaders of a stage have; for none of them, which data it has."""
    loaders = [stage.loaders[index] for index in indices]
    return data_line(stage.source, stage.name, sys._getframe(), loaders, by_length=by_length)


def _counting(agreement: Agreement, end: EpochEnd, facts: LoaderFacts, data: DataFacts) -> Iterate:
    if end.ends_at is None:
        return partial(until, length=end.length or 0, repeat=data.on_uneven == "repeat")
    last = end.ends_at
    readings = [BatchesRead(batches=min(length, last + 1), ended=length <= last) for length in end.lengths]
    return partial(until, length=last, error=partial(agreement.uneven, data, facts, readings))
