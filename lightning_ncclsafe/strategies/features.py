"""The features of one call of the Trainer: those that its callbacks ask for, and the common stop on SIGTERM.

The Trainer and its strategy are duck-typed; Lightning is not imported here.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.code.this_host import host_name
from lightning_ncclsafe.collectives.timer import AttachedTimer
from lightning_ncclsafe.errors import HostPreflightError
from lightning_ncclsafe.exchange import Exchange, comes_first
from lightning_ncclsafe.exchange.meeting import Agreed, Meeting
from lightning_ncclsafe.facts import Phase, Progress, RankFacts
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.loaders.agreement import Agreement
from lightning_ncclsafe.loaders.collecting import LoaderCollector, Stage
from lightning_ncclsafe.loaders.tuning.tuner import Tuner
from lightning_ncclsafe.preflight.check import FindingKey, Preflight
from lightning_ncclsafe.preflight.load import loaders_load, model_load
from lightning_ncclsafe.preflight.probe import RecentFacts
from lightning_ncclsafe.probes.host.capacity import capacity
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.rules.kit.data import TRAIN
from lightning_ncclsafe.settings import (
    AgreementSettings,
    CheckpointSettings,
    Limits,
    PreflightSettings,
    TimerSettings,
    TunerSettings,
)
from lightning_ncclsafe.sigterm.agreement import StopAgreement
from lightning_ncclsafe.sigterm.handler import StopSignal, requeue_once
from lightning_ncclsafe.strategies.saved_at_end import SavedAtEnd

T = TypeVar("T")

# How long ranks still wait for one another's loaders after the guard has reported on the wait.
_PRESENT_S = 30.0
# How long they wait for one another if all are known to run.
_MEET_S = 10.0
# For all calls of this process, of which each compares its hosts.
_host = RecentFacts()
_printed_of_hosts: set[FindingKey] = set()


class Features:
    """The features of one call: preflight, agreement on data, tuning of loaders, timing of collectives, SIGTERM.

    If one of them fails, that is usually printed once, and the call continues without it.

    Args:
        check: Raises if the run ends while a rank waits for others.

    Attributes:
        timer: Times collectives; None if no callback asks for it.
        saved_at_end: Saves the state of a run that ends, and resumes from it, if a callback asks for it.
    """

    def __init__(
        self,
        trainer: Any,
        limits: Limits,
        report_dir: Path,
        *,
        tracker: ActionTracker,
        trainer_probe: TrainerProbe,
        incidents: IncidentNumbers,
        combined: type,
        sigterm_error: type[BaseException] | None,
        weights: Callable[[], Any],
        check: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._limits = limits
        self._report_dir = report_dir
        self._tracker = tracker
        self._trainer_probe = trainer_probe
        self._incidents = incidents
        self._combined = combined
        self._sigterm_error = sigterm_error
        self._check = check
        self.timer: AttachedTimer | None = None
        self.saved_at_end = SavedAtEnd(
            trainer,
            lambda: settings_of(trainer, CheckpointSettings),
            weights=weights,
            is_on_gpu=trainer_probe.is_on_gpu,
            stop=lambda: self._stop,
            requeue=self._requeue,
        )
        self._connected: tuple[Place, Exchange] | None = None
        self._preflight: Preflight | None = None
        self._collector: LoaderCollector | None = None
        self._tuner: Tuner | None = None
        self._stop: StopAgreement | None = None
        self._stop_signal: StopSignal | None = None

    # From the beginning of the call to its end.

    def begin(self, place: Place) -> None:
        """Starts what needs no other rank: the preflight looks at this host."""
        self._preflight = self._make_preflight(place)

    def connect(self, strategy: Any, place: Place, exchange: Exchange) -> None:
        """Compares hosts, and starts the rest, once all ranks have joined.

        Raises:
            HostPreflightError: On all ranks, if the user wants that.
        """
        self._compare_hosts(lambda preflight: preflight.compare(exchange))
        self.saved_at_end.connect(place, exchange)
        self._tuner = self._make_tuner(place, exchange)
        if place.world_size > 1 or self._tuner is not None or self._preflight is not None:
            self._collector = self._make_collector(strategy, place, exchange)
            self._collector.attach()
        if strategy.is_on_all_ranks and (place.world_size > 1 or self._saves):
            self._stop_together(strategy, place, exchange)
        if place.world_size > 1:
            self.timer = self._make_timer(place, exchange)
        self._connected = place, exchange

    def meet(self, place: Place, exchange: Exchange) -> bool:
        """Returns whether all ranks have the guard: the same on all ranks.

        Called right after Lightning has made all ranks wait for one another.
        """
        meeting = Meeting(
            exchange=exchange,
            rank=place.rank,
            world_size=place.world_size,
            deadline_s=_MEET_S,
            say=say_on_stderr,
            name="guards",
        )
        agreed = meeting.meet(_identity(place), lambda ranks: Agreed(complete=len(ranks) == place.world_size))
        if not agreed.complete and comes_first(exchange, "guards/off", place.rank):
            say_on_stderr(
                "not all ranks have the guard, so it is off on all of them: start every rank with ncclsafe run, or with"
                " NCCLSAFE=1 in its environment, and install the same lightning-ncclsafe on every host"
            )
        return agreed.complete

    def prepared(self, loader: Any) -> Any:
        """Called when Lightning has prepared a loader; see :meth:`LoaderCollector.prepared`."""
        return loader if self._collector is None else self._collector.prepared(loader)

    def before_evaluation_batch(self) -> None:
        """Called before each batch of evaluation; see :meth:`StopSignal.before_evaluation_batch`."""
        if self._stop_signal is not None:
            self._stop_signal.before_evaluation_batch()

    def poll(self) -> None:
        """Called on the watchdog's thread while the run continues: advances the agreement on where to stop."""
        # The main thread may be about to leave.
        if (stop_signal := self._stop_signal) is not None:
            stop_signal.poll()
        if self._stop is not None:
            self._stop.poll()
        self.saved_at_end.poll()

    def fail(self) -> None:
        """Called when this rank's call has failed."""
        if self._stop_signal is not None:
            self._stop_signal.fail()

    def leave(self) -> None:
        """Called when this rank has no further batch."""
        if self._stop is not None:
            self._stop.leave()

    def detach(self, safely: Callable[[Callable[[], None]], object]) -> None:
        """Restores Lightning's methods, except those that the timer listens to; ``safely`` runs each step."""
        collector, self._collector = self._collector, None
        stop_signal, self._stop_signal = self._stop_signal, None
        tuner, self._tuner = self._tuner, None
        # Further exceptions may follow that need what was recorded.
        for attached in (collector, stop_signal):
            if attached is not None:
                safely(attached.detach)
        self.saved_at_end.detach(safely)
        if tuner is not None:
            safely(tuner.close)

    def detach_timer(self) -> None:
        """Ends the timer, last of all: after an error, it waits for the times of the other ranks."""
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.detach()

    # Hosts.

    def _make_preflight(self, place: Place) -> Preflight | None:
        settings = settings_of(self._trainer, PreflightSettings)
        if settings is None:
            return None
        trainer, data_dir = self._trainer, settings.data_dir
        # As the user has set it: the size of the recorder is about to be set there.
        environment = dict(os.environ)
        preflight = Preflight(
            lambda: _host.get(
                environment=environment,
                directories=self._trainer_probe.directories() | ({"data": data_dir} if data_dir is not None else {}),
                load=model_load(trainer.lightning_module),
                local_rank=place.local_rank,
                gpu_index=trainer.strategy.root_device.index,
                is_cuda=trainer.strategy.root_device.type == "cuda",
            ),
            on_problem=settings.on_problem,
            identity=_identity(place),
            world_size=place.world_size,
            report_dir=self._report_dir,
            incidents=self._incidents,
            printed=_printed_of_hosts,
            say=say_on_stderr,
        )
        preflight.begin()
        return preflight

    def _compare_hosts(self, compare: Callable[[Preflight], object]) -> None:
        preflight, self._preflight = self._preflight, None
        if preflight is None:
            return
        try:
            with self._tracker.action("preflight"):
                compare(preflight)
        except HostPreflightError:
            raise
        except Exception as error:  # the run continues without
            say_own_failure(error, what="the comparison of hosts")
        else:
            self._preflight = preflight

    def _compare_load(self, stage: Stage) -> None:
        """Compares the load that loaders put on hosts; a tuner that lowers it reports that itself."""
        settings = settings_of(self._trainer, TunerSettings)
        if stage.name == TRAIN and not (settings is not None and settings.apply):
            loaders = [*stage.loaders, *self._trainer_probe.validation_loaders()]
            self._compare_hosts(lambda preflight: preflight.compare_load(loaders_load(loaders)))

    # Loaders.

    def _make_tuner(self, place: Place, exchange: Exchange) -> Tuner | None:
        settings = settings_of(self._trainer, TunerSettings)
        if settings is None:
            return None
        try:
            tuner = Tuner(settings, exchange, rank=place.rank, world_size=place.world_size, capacity=capacity())
            tuner.start()
        except Exception as error:  # the loaders stay as they are
            say_own_failure(error, what="the tuning of loaders")
            return None
        return tuner

    def _make_collector(self, strategy: Any, place: Place, exchange: Exchange) -> LoaderCollector:
        return LoaderCollector(
            trainer=self._trainer,
            strategy=strategy,
            agreement=self._make_agreement(place, exchange) if place.world_size > 1 else None,
            # Data on which stock Lightning trains, such as different data on each rank, is refused only on request.
            settings=settings_of(self._trainer, AgreementSettings) or AgreementSettings(on_mismatch="raise_on_hang"),
            combined=self._combined,
            tracker=self._tracker,
            timeout_s=self._limits.longest_s,
            tuner=self._tuner,
            on_stage=self._compare_load,
        )

    def _make_agreement(self, place: Place, exchange: Exchange) -> Agreement:
        return Agreement(
            meeting=Meeting(
                exchange=exchange,
                rank=place.rank,
                world_size=place.world_size,
                deadline_s=min(self._limits.suspect_after_s + _PRESENT_S, self._limits.timeout_s),
                say=say_on_stderr,
                check=self._check,
            ),
            world_size=place.world_size,
            identity=_identity(place),
            report_dir=self._report_dir,
            incidents=self._incidents,
            say=say_on_stderr,
        )

    # SIGTERM, and timing.

    def _requeue(self) -> None:
        if self._connected is not None and self._stop_signal is not None and self._stop_signal.is_to_requeue:
            place, exchange = self._connected
            requeue_once(exchange, place.rank, say_on_stderr)

    def _stop_together(self, strategy: Any, place: Place, exchange: Exchange) -> None:
        """Sets up the common stop on SIGTERM, unless Lightning handles it."""
        if self._sigterm_error is None:
            return
        self._stop = StopAgreement(
            exchange,
            rank=place.rank,
            world_size=place.world_size,
            hosts_store=stores.hosts_store(place.rank),
            # If ranks may have different numbers of batches, and wait for no other.
            each_alone=place.world_size == 1
            or (self._trainer.state.fn == "predict" and not strategy.forward_communicates),
        )
        self._stop_signal = StopSignal(self._trainer, self._stop, self._sigterm_error, takes_slurms=self._saves)
        self._stop_signal.attach()

    @property
    def _saves(self) -> bool:
        """Whether the state of this call is saved when it is ended."""
        return settings_of(self._trainer, CheckpointSettings) is not None and self._trainer.state.fn == "fit"

    def _make_timer(self, place: Place, exchange: Exchange) -> AttachedTimer | None:
        settings = settings_of(self._trainer, TimerSettings)
        if settings is None:
            return None
        try:
            return AttachedTimer(
                self._trainer,
                self._tracker,
                exchange,
                settings,
                rank=place.rank,
                world_size=place.world_size,
                report_dir=self._report_dir,
            )
        except Exception as error:  # the guard works without
            say_own_failure(error, what="the timing of collectives")
            return None


def settings_of(trainer: Any, kind: type[T]) -> T | None:
    """The settings of the Trainer's callback of this kind, if it has one."""
    found = (getattr(callback, "settings", None) for callback in trainer.callbacks)
    return next((settings for settings in found if isinstance(settings, kind)), None)


def _identity(place: Place) -> RankFacts:
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        host=host_name(),
        pid=os.getpid(),
        progress=Progress(phase=Phase.INIT),
    )
