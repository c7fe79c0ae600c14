"""One guarded call of ``fit``, ``validate``, ``test`` or ``predict``.

The strategy and its Trainer are duck-typed; Lightning is not imported here.
"""

import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_ncclsafe._torch import process_groups, recorders
from lightning_ncclsafe.code.raised import is_of_signal_handler
from lightning_ncclsafe.collectives.timer import RECORDER_SIZE
from lightning_ncclsafe.errors import CollectiveTimeoutError, HostPreflightError
from lightning_ncclsafe.exchange import Exchange
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.guard.group_timeouts import GroupTimeouts
from lightning_ncclsafe.guard.guard import Guard
from lightning_ncclsafe.guard.leaving import is_orderly
from lightning_ncclsafe.guard.restarts import follow_plan, incident_before
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.guard.thresholds import limits_words
from lightning_ncclsafe.guard.witness import Witness
from lightning_ncclsafe.loggers.offload import drain_all, live_facts
from lightning_ncclsafe.probes.process import stacks
from lightning_ncclsafe.probes.process.caught import CaughtExceptions
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.probes.rank_info import RankInfo
from lightning_ncclsafe.probes.trainer.actions import SAVE, ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.probes.trainer.steps import StepRecord
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.settings import Limits, TimerSettings, report_folder
from lightning_ncclsafe.strategies.call_exchanges import CallExchanges
from lightning_ncclsafe.strategies.features import Features, settings_of

T = TypeVar("T")

# The last announcement of this process: a program with many calls and Trainers prints it once.
_printed_watch = ""
# For all calls of this process; the same on all ranks.
_incidents = IncidentNumbers()
# The other ranks of this host, known before they reach the next call.
_met: dict[int, RankInfo] = {}
# For all calls: a process beside this one, if no other rank of its host is there.
_witness = Witness()
# For all calls, too: a caught exception that ended one call may explain where this rank is in the next.
_caught = CaughtExceptions(process_groups.is_communication_error)


class GuardedCall:
    """One guarded call: the guard, if it could be made, and the objects that it observes.

    The guard must never harm the run: whatever fails in here is printed once, and the guard is off.

    Args:
        report_dir: The folder of reports as the user has set it; None for the default.
        ending: The end of this run, which may come in this call.
        combined: Lightning's ``CombinedLoader``.
        sigterm_error: Lightning's ``SIGTERMException``; None leaves SIGTERM to Lightning.
        weights: Gives the state of the model in Lightning's own way.

    Attributes:
        steps: Records training steps without a backward pass, and failed saves.
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
        weights: Callable[[], Any] = dict,
    ) -> None:
        stacks.train_here()
        self.trainer_probe = TrainerProbe(trainer)
        self.tracker = ActionTracker()
        self.steps = StepRecord(trainer)
        self.tracker.on_failed = self._action_failed
        self._trainer = trainer
        self._limits = limits
        self._report_dir = report_folder(report_dir, trainer.default_root_dir)
        self._ending = ending
        self._exchanges = CallExchanges(self._report_dir)
        self.features = Features(
            trainer,
            limits,
            self._report_dir,
            tracker=self.tracker,
            trainer_probe=self.trainer_probe,
            incidents=_incidents,
            combined=combined,
            sigterm_error=sigterm_error,
            weights=weights,
            check=lambda: self._guard.check() if self._guard is not None else None,
        )
        self._saved_at_end = self.features.saved_at_end
        self._group_timeouts = GroupTimeouts(
            limits, lambda: self.trainer_probe.limit_name(is_saving=self.tracker.is_in("save_checkpoint"))
        )
        self._guard: Guard | None = None
        self._place: Place | None = None
        self._listens = self._leaves = self._has_failed = False
        self._interrupted: Exception | None = None
        self._meet: Callable[[], bool] | None = None
        self._end_witness: Callable[[], None] = lambda: None

    def begin(self, strategy: Any) -> None:
        """Starts the guard. There is no process group, and so no store, yet."""
        self._safely(self._listen)
        # Before the guard looks: looking at a recorder creates it, and fixes its size.
        self._safely(lambda: recorders.make(self._recorder_size()))
        self._safely(lambda: self._begin(strategy))

    def recorder(self) -> AbstractContextManager[None]:
        """A context for the creation of the process group, which reads the Flight Recorder's size, too."""
        self._safely(self._name_start)
        return recorders.of_size(self._recorder_size())

    def connect(self, strategy: Any) -> None:
        """Changes to the job's store, which exists now, and prints that the guard is on."""
        self._group_timeouts.start()
        if self._limits.phases_s:
            self.tracker.listeners += (self._group_timeouts.listen,)
        self._safely(lambda: self._connect(strategy))

    def set_up(self) -> None:
        """Called when Lightning has set everything up, and has made the last of its process groups."""
        self._safely(self._meet_others)
        self.trainer_probe.started = True
        self._safely(self.steps.begin)
        self._safely(self._saved_at_end.set_up)
        self._group_timeouts.start()
        self._safely(lambda: self._guard.set_up() if self._guard is not None else None)

    def step_begins(self) -> None:
        """Called before an optimizer's step."""
        if self._saved_at_end.ledger is not None:
            self._saved_at_end.ledger.step_begins()

    def stepped(self, optimizer: Any) -> None:
        """Called after an optimizer's step."""
        if self._saved_at_end.ledger is not None:
            self._saved_at_end.ledger.step_ended()
        self.steps.stepped(optimizer)

    def saves(self, path: Any) -> None:
        """Called before a checkpoint is written."""
        self._saved_at_end.last_checkpoint.begin(path)

    def saved(self) -> None:
        """Called when all ranks have passed the save of a checkpoint."""
        self._saved_at_end.last_checkpoint.end()
        self.steps.saved()

    def failed(self, error: BaseException) -> CollectiveTimeoutError | None:
        """Reports an exception to the other ranks; returns the error to raise instead, if there is a better one."""
        self._leaves = self._has_failed = True
        self._safely(self.features.fail)
        # Recorded as caught, too: in a later call, ranks that ended because of it would be missing.
        self.raised(error, f"Trainer.{getattr(self._trainer.state.fn, 'value', 'fit')}")
        return self._leaving(lambda guard: guard.failed(error))

    def leaves_others(self, error: BaseException) -> bool:
        """Whether not all ranks leave with an exception, so that nothing that needs all ranks can be done any more."""
        # When a run is ended, its ranks may not all raise.
        stops_all = is_orderly(error) and not isinstance(error, CollectiveTimeoutError)
        return self._guard is not None and not stops_all and not self._guard.leaves_jointly

    def finish(self) -> None:
        """Waits until all ranks have finished."""
        self._leaves = True
        self._safely(self.features.leave)
        self._leaving(lambda guard: guard.finish())

    def close(self) -> None:
        """Restores everything; an ended run still refuses saves, as Lightning's handlers save, too.

        Raises:
            Exception: What the handler of a signal has raised since the call has finished.
        """
        self._leaves = True
        self.features.detach(self._safely)
        self._safely(self.tracker.detach)
        if self._listens:
            self._safely(_caught.close)
        self._safely(self._group_timeouts.restore)
        self._safely(self.features.detach_timer)
        self._leaving(lambda guard: guard.close())
        self._safely(self._end_witness)
        # Not before: another Trainer may run within this call.
        self._exchanges.close()
        interrupted, self._interrupted = self._interrupted, None
        # An exception with which the call has failed says more.
        if interrupted is not None and not self._has_failed:
            raise interrupted

    def raised(self, error: BaseException, passed: str) -> None:
        """Records an exception on the main thread, which may yet be caught."""
        _caught.note(error, passed=passed, callers=sys._getframe())

    def _listen(self) -> None:
        _caught.start()
        self._listens = True

    def _action_failed(self, name: str, error: BaseException) -> None:
        if name == SAVE:
            self._safely(lambda: self.steps.save_failed(error))
        self.raised(error, name)

    def _recorder_size(self) -> int:
        timed = settings_of(self._trainer, TimerSettings) is not None
        return RECORDER_SIZE if timed else recorders.DEFAULT_SIZE

    def _begin(self, strategy: Any) -> None:
        # The strategy is about to do the same: some environments need it to know the rank.
        strategy.set_world_ranks()
        self.tracker.attach(self._trainer.profiler)
        self._place = place = place_of(strategy)
        self.features.begin(place)
        self._guard = self._make_guard(strategy, place, self._exchanges.before_start(strategy))
        self._guard.start()

    def _make_guard(self, strategy: Any, place: Place, exchange: Exchange) -> Guard:
        return Guard(
            place=place,
            limits=self._limits,
            report_dir=self._report_dir,
            incidents=_incidents,
            met=_met,
            exchange=exchange,
            probe=RankProbe(
                rank=place.rank,
                local_rank=place.local_rank,
                local_world_size=place.local_world_size,
                tracker=self.tracker,
                trainer=self.trainer_probe,
                loggers=live_facts,
                stragglers=lambda: timer.timer.stragglers if (timer := self.features.timer) is not None else (),
                steps=self.steps,
                caught=_caught,
                launched=lambda: _exit_codes(strategy.launcher),
            ),
            ending=self._ending,
            write_logs=drain_all,
            before_exit=lambda: strategy.launcher.kill(signal.SIGKILL) if strategy.launcher is not None else None,
            save=self._saved_at_end.save,
            phase_kind=lambda: (self.trainer_probe.phase_kind(self.tracker.actions()), self.trainer_probe.batch_idx()),
            on_tick=self._poll,
        )

    def _connect(self, strategy: Any) -> None:
        place = self._place
        if self._guard is None or place is None:
            return
        exchange = self._exchanges.once_started(place.world_size)
        self._guard.connect(exchange)
        if place.local_world_size == 1 < place.world_size and (keys := self._exchanges.keys()) is not None:
            self._end_witness = _witness.begin(
                rank=place.rank,
                world_size=place.world_size,
                keys=keys,
                folder=str(self._exchanges.fallback.absolute()),
                longest_s=self._limits.longest_s,
            )
        follow_plan(exchange, place, self._report_dir)
        self.features.connect(strategy, place, exchange)
        if place.world_size > 1 and not strategy.is_on_all_ranks:
            self._meet = partial(self.features.meet, place, exchange)
        if place.rank == 0:
            self._say_watch(place.world_size)

    def _meet_others(self) -> None:
        """Turns the guard off if some ranks do not have it: it would wait for them."""
        meet, self._meet = self._meet, None
        if meet is None or self._guard is None or meet():
            return
        guard, self._guard = self._guard, None
        self.features.detach(self._safely)
        self._safely(self.features.detach_timer)
        guard.close()

    def _say_watch(self, world_size: int) -> None:
        """Prints that the guard is on, again only if that changes; the first time with how the last start ended."""
        global _printed_watch
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        text = f"watching {ranks}: {limits_words(self._limits)}; reports go to {self._report_dir}"
        if text != _printed_watch:
            before = "" if _printed_watch else incident_before(self._report_dir)
            say_on_stderr(f"{text}{'; ' if before else ''}{before}")
            _printed_watch = text

    def _poll(self) -> None:
        # Not while the run is being ended: launchers then send SIGTERM to the remaining ranks.
        if self._guard is None or not self._guard.ends_run:
            self.features.poll()

    def _name_start(self) -> None:
        if self._guard is not None and self._place is not None:
            self._exchanges.name_start(self._place, self._limits.limit_s("init"))

    def _leaving(self, act: Callable[[Guard], T]) -> T | None:
        guard = self._guard
        return self._safely(lambda: act(guard) if guard is not None else None)

    def _safely(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (CollectiveTimeoutError, HostPreflightError):
            raise
        except Exception as error:
            # Lightning's handler of SIGTERM may interrupt the main thread here, and calls a collective.
            if self._leaves and process_groups.is_communication_error(error):
                return None
            if self._leaves and is_of_signal_handler(error):
                # What is left is done all the same: a guard that nobody closes would end the process one day.
                self._interrupted = error
            else:
                say_own_failure(error)
            guard, self._guard = self._guard, None
            if guard is not None:
                with suppress(Exception):
                    guard.close()
            return None


def _exit_codes(launcher: Any) -> dict[int, int]:
    """The exit codes of the ranks that this process has started and waited for."""
    processes = getattr(launcher, "procs", ())
    codes = {process.pid: getattr(process, "returncode", None) for process in processes}
    return {pid: code for pid, code in codes.items() if code is not None}


def place_of(strategy: Any) -> Place:
    """Which rank this is, according to Lightning: a scheduler may number ranks differently."""
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
