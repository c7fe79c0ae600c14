"""One call of ``fit``, ``validate``, ``test`` or ``predict`` under the guard: made, connected, closed for a strategy.

The strategy and its Trainer are used by duck type; Lightning is not imported here.
"""

import itertools
import os
import signal
import socket
import sys
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lightning_ncclsafe import _torch
from lightning_ncclsafe.collectives.attaching import AttachedTimer
from lightning_ncclsafe.collectives.timer import RECORDER_SIZE
from lightning_ncclsafe.errors import CollectiveTimeoutError, HostPreflightError
from lightning_ncclsafe.exchange import (
    DirectoryExchange,
    Exchange,
    ExchangeError,
    FallbackExchange,
    MemoryExchange,
    TcpStoreExchange,
)
from lightning_ncclsafe.exchange.meeting import Meeting
from lightning_ncclsafe.facts import Phase, Progress, RankFacts
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.guard.group_timeouts import GroupTimeouts
from lightning_ncclsafe.guard.guard import Guard
from lightning_ncclsafe.guard.local_ranks import Place
from lightning_ncclsafe.guard.restarts import agree_on_start, incident_before
from lightning_ncclsafe.guard.thresholds import limits_words
from lightning_ncclsafe.loaders.agreement import Agreement
from lightning_ncclsafe.loaders.collecting import LoaderCollector, Stage
from lightning_ncclsafe.loaders.tuning.tuner import Tuner
from lightning_ncclsafe.loggers.offload import drain_all, live_facts
from lightning_ncclsafe.preflight.check import Preflight
from lightning_ncclsafe.preflight.load import loaders_load, model_load
from lightning_ncclsafe.preflight.probe import preflight_facts
from lightning_ncclsafe.probes.host.capacity import capacity
from lightning_ncclsafe.probes.process.caught import CaughtExceptions
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.probes.trainer.actions import SAVE, ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.probes.trainer.steps import StepRecord
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.rules.kit.data import TRAIN
from lightning_ncclsafe.settings import (
    AgreementSettings,
    Limits,
    PreflightSettings,
    TimerSettings,
    TunerSettings,
    report_folder,
)
from lightning_ncclsafe.sigterm.agreement import StopAgreement
from lightning_ncclsafe.sigterm.handler import StopSignal

T = TypeVar("T")

# How long ranks wait for one another's loaders after the guard has looked at what holds them up.
_PRESENT_S = 30.0

# What torchrun and SLURM call a start of a job, so that a restart on the same port is not taken for the one before.
_START_NAMES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")

# Each call that ranks guard together has keys of its own on the store; they call fit, validate, … in the same order.
_calls = itertools.count()
# What this rank has published in calls that have ended; a program may make any number of them.
_published: deque[set[str]] = deque()
# The name of this start, where the store may hold what an earlier one has left; the same for all calls.
_start: str | None = None
# What this process has said last of its watch: a program with many calls and Trainers says it once.
_said_watch = ""
# Of all calls of this process; the same on all ranks.
_incidents = IncidentNumbers()
# Likewise: what ended one call, and was caught, may be why this rank stands elsewhere in the next.
_caught = CaughtExceptions(_torch.is_communication_error)


class GuardedCall:
    """One guarded call: the guard, if it could be made, and what it listens to.

    The guard must never hurt the run it guards: whatever fails in here is said once, and the guard is off.

    Args:
        trainer: The ``Trainer``.
        limits: When to look and when to end.
        report_dir: The folder of reports as the user has set it; None for the default.
        ending: Of this run, which may be ended in this call.
        combined: Lightning's ``CombinedLoader``.
        sigterm_error: Lightning's ``SIGTERMException``; None leaves SIGTERM to Lightning.

    Attributes:
        trainer_probe: Where the Trainer stands.
        tracker: What Lightning is doing.
        steps: Which training steps had no backward pass, and what failed to be saved.
        timer: Times collectives; None where nobody asks for it.
    """

    def __init__(
        self,
        trainer: Any,
        limits: Limits,
        report_dir: str | Path | None,
        *,
        ending: Ending,
        combined: type,
        sigterm_error: type[BaseException] | None,
    ) -> None:
        self.trainer_probe = TrainerProbe(trainer)
        self.tracker = ActionTracker()
        self.steps = StepRecord(trainer, _torch.is_communication_error)
        self.tracker.on_failed = self._action_failed
        self._trainer = trainer
        self._limits = limits
        self._report_dir = report_folder(report_dir, trainer.default_root_dir)
        self._ending = ending
        self._combined = combined
        self._sigterm_error = sigterm_error
        self._group_timeouts = GroupTimeouts(limits, self._limit_name)
        self._guard: Guard | None = None
        self._place: Place | None = None
        self._collector: LoaderCollector | None = None
        self._tuner: Tuner | None = None
        self._preflight: Preflight | None = None
        self.timer: AttachedTimer | None = None
        self._stop: StopAgreement | None = None
        self._stop_signal: StopSignal | None = None
        self._listens = False
        self._own_keys: set[str] = set()

    def begin(self, strategy: Any) -> None:
        """Starts the guard. There is no process group, and so no store, yet."""
        self._unharmed(self._listen)
        # Before the guard looks: to look at a recorder makes it, and fixes its size.
        self._unharmed(lambda: _torch.make_recorders(self._recorder_size()))
        self._unharmed(lambda: self._begin(strategy))

    def recorder(self) -> AbstractContextManager[None]:
        """Around the creation of the process group, which looks for the Flight Recorder's size, too."""
        self._unharmed(self._name_start)
        return _torch.recorder_of_size(self._recorder_size())

    def connect(self, strategy: Any) -> None:
        """Goes over to the job's store, which exists now, and says that the guard is on."""
        self._group_timeouts.start()
        if self._limits.phases_s:
            self.tracker.listeners += (self._group_timeouts.listen,)
        self._unharmed(lambda: self._connect(strategy))

    def set_up(self) -> None:
        """Lightning has set everything up, and with it made the process groups that it had not made before."""
        self.trainer_probe.started = True
        self._unharmed(self.steps.begin)
        self._group_timeouts.start()
        self._unharmed(lambda: self._guard.set_up() if self._guard is not None else None)

    def prepared(self, loader: Any) -> Any:
        """Lightning has prepared a loader; with the last one of its stage, those of all ranks are compared.

        Raises:
            DatasetMismatchError: On all ranks, if they disagree.
        """
        return loader if self._collector is None else self._collector.prepared(loader)

    def before_evaluation_batch(self) -> None:
        """Called before each batch of validation, test and prediction.

        Raises:
            BaseException: Lightning's on SIGTERM, where the ranks have agreed to stop here.
        """
        if self._stop_signal is not None:
            self._stop_signal.before_evaluation_batch()

    def failed(self, error: BaseException) -> CollectiveTimeoutError | None:
        """Tells the other ranks; returns the error to raise instead, if there is a better one."""
        # If it is caught, and there is another call, those who were ended because of it will be missed there.
        self.raised(error, f"Trainer.{getattr(self._trainer.state.fn, 'value', 'fit')}")
        return self._leaving(lambda guard: guard.failed(error))

    def finish(self) -> None:
        """Waits until all ranks have finished."""
        if self._stop is not None:
            self._unharmed(self._stop.leave)
        self._leaving(lambda guard: guard.finish())

    def close(self) -> None:
        """Leaves nothing behind, but for the gate of a run that has been ended: Lightning's handlers save, too."""
        collector, self._collector = self._collector, None
        stop_signal, self._stop_signal = self._stop_signal, None
        for attached in (collector, stop_signal):
            if attached is not None:
                self._unharmed(attached.detach)
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            self._unharmed(tuner.close)
        self._unharmed(self.tracker.detach)
        if self._listens:
            self._unharmed(_caught.close)
        self._group_timeouts.restore()
        timer, self.timer = self.timer, None
        if timer is not None:
            self._unharmed(timer.detach)
        self._leaving(lambda guard: guard.close())
        # Not before: another Trainer may run within this call.
        if self._own_keys:
            _published.append(self._own_keys)

    def raised(self, error: BaseException, passed: str) -> None:
        """An exception has left something on the main thread, and may yet be caught."""
        _caught.note(error, passed=passed, callers=sys._getframe())

    def _listen(self) -> None:
        _caught.start()
        self._listens = True

    def _action_failed(self, name: str, error: BaseException) -> None:
        if name == SAVE:
            self._unharmed(lambda: self.steps.save_failed(error))
        self.raised(error, name)

    def _recorder_size(self) -> int:
        timed = _settings_of(self._trainer, TimerSettings) is not None
        return RECORDER_SIZE if timed else _torch.DEFAULT_RECORDER_SIZE

    def _begin(self, strategy: Any) -> None:
        # As the strategy is about to do: some environments do not know the rank by themselves.
        strategy.set_world_ranks()
        self.tracker.attach(self._trainer.profiler)
        self._place = place = _place(strategy)
        self._preflight = self._make_preflight(place)
        self._guard = Guard(
            place=place,
            limits=self._limits,
            report_dir=self._report_dir,
            incidents=_incidents,
            exchange=self._files(_meeting_place(strategy)) if place.world_size > 1 else MemoryExchange(),
            probe=RankProbe(
                rank=place.rank,
                local_rank=place.local_rank,
                local_world_size=place.local_world_size,
                tracker=self.tracker,
                trainer=self.trainer_probe,
                loggers=live_facts,
                stragglers=lambda: self.timer.stragglers() if self.timer is not None else (),
                steps=self.steps,
                caught=_caught,
                launched=lambda: _exit_codes(strategy.launcher),
            ),
            ending=self._ending,
            write_logs=drain_all,
            before_exit=lambda: strategy.launcher.kill(signal.SIGKILL) if strategy.launcher is not None else None,
            phase_kind=lambda: (self._phase_kind(), self.trainer_probe.batch_idx()),
            on_tick=self._poll,
        )
        self._guard.start()

    def _connect(self, strategy: Any) -> None:
        if self._guard is None:
            return
        world_size = strategy.world_size
        exchange = self._store() if world_size > 1 else MemoryExchange()
        self._guard.connect(exchange)
        self._compare_hosts(lambda preflight: preflight.compare(exchange))
        self._tuner = self._make_tuner(strategy, exchange)
        if world_size > 1 or self._tuner is not None or self._preflight is not None:
            self._collector = self._make_collector(strategy, exchange)
            self._collector.attach()
        if world_size > 1:
            self._stop_together(strategy, exchange)
            self._time(strategy, exchange)
        if strategy.global_rank == 0:
            self._say_watch(world_size)

    def _say_watch(self, world_size: int) -> None:
        """Once, and again where it has changed; with what the start before has ended, the first time only."""
        global _said_watch
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        text = f"watching {ranks}: {limits_words(self._limits)}; reports go to {self._report_dir}"
        if text != _said_watch:
            before = "" if _said_watch else incident_before(self._report_dir)
            say_on_stderr(f"{text}{'; ' if before else ''}{before}")
            _said_watch = text

    def _stop_together(self, strategy: Any, exchange: Exchange) -> None:
        """On SIGTERM; a rank that has no others stops as Lightning has it."""
        if self._sigterm_error is None:
            return
        self._stop = StopAgreement(
            exchange,
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            hosts_store=_torch.hosts_store(strategy.global_rank),
            # Where ranks may have different numbers of batches, and wait for nobody.
            each_alone=self._trainer.state.fn == "predict" and not strategy.forward_communicates,
        )
        self._stop_signal = StopSignal(self._trainer, self._stop, self._sigterm_error)
        self._stop_signal.attach()

    def _time(self, strategy: Any, exchange: Exchange) -> None:
        settings = _settings_of(self._trainer, TimerSettings)
        if settings is None:
            return
        try:
            self.timer = AttachedTimer(
                self._trainer,
                self.tracker,
                exchange,
                settings,
                rank=strategy.global_rank,
                world_size=strategy.world_size,
                report_dir=self._report_dir,
            )
        except Exception as error:  # the guard can do without
            say_own_failure(error, what="the timing of collectives")

    def _make_preflight(self, place: Place) -> Preflight | None:
        settings = _settings_of(self._trainer, PreflightSettings)
        if settings is None:
            return None
        trainer = self._trainer
        # As the user has set it: meanwhile the recorder of this job is given its size there.
        environment = dict(os.environ)
        preflight = Preflight(
            lambda: preflight_facts(
                environment=environment,
                directories=_directories(self.trainer_probe, settings),
                load=model_load(trainer.lightning_module),
                local_rank=place.local_rank,
                gpu_index=trainer.strategy.root_device.index,
                is_cuda=trainer.strategy.root_device.type == "cuda",
            ),
            on_problem=settings.on_problem,
            identity=_identity(place),
            world_size=place.world_size,
            report_dir=self._report_dir,
            incidents=_incidents,
            say=say_on_stderr,
        )
        preflight.begin()
        return preflight

    def _compare_hosts(self, compare: Callable[[Preflight], object]) -> None:
        preflight, self._preflight = self._preflight, None
        if preflight is None:
            return
        try:
            with self.tracker.action("preflight"):
                compare(preflight)
        except HostPreflightError:
            raise
        except Exception as error:  # the run goes on without
            say_own_failure(error, what="the comparison of hosts")
        else:
            self._preflight = preflight

    def _compare_load(self, stage: Stage) -> None:
        """What loaders ask of a host is known once they are there; a tuner says itself what it has lowered."""
        settings = _settings_of(self._trainer, TunerSettings)
        if stage.name == TRAIN and not (settings is not None and settings.apply):
            loaders = [*stage.loaders, *self.trainer_probe.validation_loaders()]
            self._compare_hosts(lambda preflight: preflight.compare_load(loaders_load(loaders)))

    def _make_tuner(self, strategy: Any, exchange: Exchange) -> Tuner | None:
        settings = _settings_of(self._trainer, TunerSettings)
        if settings is None:
            return None
        try:
            tuner = Tuner(
                settings, exchange, rank=strategy.global_rank, world_size=strategy.world_size, capacity=capacity()
            )
            tuner.start()
        except Exception as error:  # the loaders stay as they are
            say_own_failure(error, what="the tuning of loaders")
            return None
        return tuner

    def _poll(self) -> None:
        # A run that is being ended ends otherwise: launchers send SIGTERM to the ranks that are left.
        is_ending = self._guard is not None and self._guard.ends_run
        if self._stop is not None and not is_ending:
            self._stop.poll()

    def _make_collector(self, strategy: Any, exchange: Exchange) -> LoaderCollector:
        return LoaderCollector(
            trainer=self._trainer,
            strategy=strategy,
            agreement=self._make_agreement(_place(strategy), exchange) if strategy.world_size > 1 else None,
            # What stock trains on, different data on each rank for instance, is refused only on request.
            settings=_settings_of(self._trainer, AgreementSettings) or AgreementSettings(on_mismatch="raise_on_hang"),
            combined=self._combined,
            tracker=self.tracker,
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
            ),
            world_size=place.world_size,
            identity=_identity(place),
            report_dir=self._report_dir,
            incidents=_incidents,
            say=say_on_stderr,
        )

    def _phase_kind(self) -> PhaseKind:
        return self.trainer_probe.phase_kind(self.tracker.actions())

    def _limit_name(self) -> str:
        return self.trainer_probe.limit_name(is_saving=self.tracker.is_in("save_checkpoint"))

    def _store(self) -> Exchange:
        name = "ncclsafe" if _start is None else f"ncclsafe/{_start}"
        store = TcpStoreExchange(_torch.own_store_connection(name), prefix=f"{next(_calls)}/")
        self._own_keys = store.published
        # Whoever begins a call has seen all ranks finish the one before, so that nobody reads what was before that.
        while len(_published) > 1:
            store.forget(_published.popleft())
        return FallbackExchange(store, self._files(_name_of_run(store)))

    def _name_start(self) -> None:
        """Where the job's store is kept by torchrun's agent: this start is told from those before."""
        global _start
        place = self._place
        if self._guard is None or place is None or place.world_size == 1 or _start is not None or _torch.hosts_store(0):
            return
        store = _torch.agents_store()
        exchange = TcpStoreExchange(_torch.with_prefix("ncclsafe/starts", store))
        try:
            _start = agree_on_start(
                exchange,
                rank=place.rank,
                world_size=place.world_size,
                deadline_s=self._limits.limit_s("init"),
                clear=lambda: _torch.forget_last_start(store),
            )
        finally:
            exchange.close()

    def _files(self, name: str) -> DirectoryExchange:
        return DirectoryExchange(self._report_dir / f".exchange-{name}")

    def _leaving(self, act: Callable[[Guard], T]) -> T | None:
        guard = self._guard

        def leave() -> T | None:
            try:
                return act(guard) if guard is not None else None
            except RuntimeError as error:
                # Lightning's handler of SIGTERM, which strikes wherever the main thread is, calls a collective.
                if _torch.is_communication_error(error):
                    return None
                raise

        return self._unharmed(leave)

    def _unharmed(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (CollectiveTimeoutError, HostPreflightError):
            raise
        except Exception as error:
            say_own_failure(error)
            guard, self._guard = self._guard, None
            if guard is not None:
                with suppress(Exception):
                    guard.close()
            return None


def _name_of_run(store: Exchange) -> str:
    """A name that no other job, nor an earlier start of this one, has used."""
    mine = uuid.uuid4().hex[:12].encode()
    while True:
        try:
            return store.set_if_absent("run", mine).decode()
        except ExchangeError:
            # One missed deadline is no reason to go without a guard; after some the store is lost.
            if store.lost:
                raise


def _settings_of(trainer: Any, kind: type[T]) -> T | None:
    """Those of the Trainer's callback for this: a callback only says what is wanted."""
    found = (getattr(callback, "settings", None) for callback in trainer.callbacks)
    return next((settings for settings in found if isinstance(settings, kind)), None)


def _exit_codes(launcher: Any) -> dict[int, int]:
    """Of the ranks that this process has started, as far as it has waited for them."""
    processes = getattr(launcher, "procs", ())
    codes = {process.pid: getattr(process, "returncode", None) for process in processes}
    return {pid: code for pid, code in codes.items() if code is not None}


def _place(strategy: Any) -> Place:
    """Which rank this is: by Lightning's environment, as a scheduler may number ranks in its own way."""
    environment, devices = strategy.cluster_environment, strategy.parallel_devices
    assert environment is not None and devices is not None
    return Place(
        rank=strategy.global_rank,
        local_rank=strategy.local_rank,
        world_size=strategy.world_size,
        local_world_size=len(devices),
        master_port=str(environment.main_port),
        master_address=str(environment.main_address),
    )


def _identity(place: Place) -> RankFacts:
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        progress=Progress(phase=Phase.INIT),
    )


def _directories(probe: TrainerProbe, settings: PreflightSettings) -> dict[str, str]:
    """What the run writes to and reads from, by what it is for."""
    found = probe.directories()
    return found if settings.data_dir is None else {**found, "data": settings.data_dir}


def _meeting_place(strategy: Any) -> str:
    """A name on which the ranks of this start of this job agree without having met."""
    environment = strategy.cluster_environment
    assert environment is not None
    # Of several agents of torchrun, each counts restarts by itself.
    agents_count = "TORCHELASTIC_RESTART_COUNT" if os.environ.get("GROUP_WORLD_SIZE", "1") != "1" else ""
    start = [os.environ[name] for name in _START_NAMES if name in os.environ and name != agents_count]
    return "-".join([environment.main_address, str(environment.main_port), *start])
