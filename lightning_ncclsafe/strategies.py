"""Lightning's strategies with the guard plugged in: nothing but the plugging."""

import itertools
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_ncclsafe import _torch
from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import DirectoryExchange, Exchange, FallbackExchange, MemoryExchange, TcpStoreExchange
from lightning_ncclsafe.guard import Guard, Place
from lightning_ncclsafe.phases import PhaseTracker
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.probes.trainer import TrainerProbe
from lightning_ncclsafe.reporter import say_on_stderr, say_own_failure
from lightning_ncclsafe.settings import BACKSTOP_S, Limits, OnTimeout, check_limits, report_folder

T = TypeVar("T")

# What torchrun and SLURM call a start of a job, so that a restart on the same port is not taken for the one before.
_START_NAMES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")

# Each call that ranks guard together has keys of its own on the store; they call fit, validate, … in the same order.
_calls = itertools.count()


class _GuardedStrategy(ParallelStrategy):
    """What the strategies share. Stands before the strategy it guards in the order of inheritance."""

    _limits: Limits
    _timeout: timedelta | None
    _report_dir: str | Path | None
    _watched: "_Watched | None" = None

    def _guard_with(
        self, suspect_after: timedelta | float | None, on_timeout: OnTimeout, report_dir: str | Path | None
    ) -> None:
        self._limits = check_limits(suspect_after, self._timeout, on_timeout)
        self._report_dir = report_dir

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # The function that the launcher calls, in each process, is what the guard watches from beginning to end: it
        # is told of an exception before Lightning's own handlers, which may call collectives, see it.
        launcher = self._launcher
        if type(launcher) in _GUARDED_LAUNCHERS:
            launcher.__class__ = _GUARDED_LAUNCHERS[type(launcher)]

    def setup_environment(self) -> None:
        """Creates the process group, watched from before it exists: its creation is a wait for all ranks, too."""
        watched = self._watched
        if watched is None:
            super().setup_environment()
            return
        watched.begin(self)
        timeout = self._timeout
        self._timeout = timedelta(seconds=self._limits.timeout_s + BACKSTOP_S)
        try:
            with watched.tracker.action("init_process_group"):
                super().setup_environment()
        finally:
            self._timeout = timeout
        watched.connect(self)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks; the barrier's name, which Lightning gives and drops, tells what for."""
        name = args[0] if args else kwargs.get("name")
        watched = self._watched
        with watched.tracker.action(f"barrier:{name or ''}") if watched else nullcontext():
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]
        # Trainer._run_stage meets here once everything is set up.
        if watched is not None and name == "run-stage":
            watched.trainer_probe.started = True

    def __getstate__(self) -> dict[str, Any]:
        """Without the guard, which belongs to this process: a Trainer may be copied or sent away while it runs."""
        return {name: value for name, value in vars(self).items() if name != "_watched"}

    @contextmanager
    def _watch(self, trainer: Any) -> Iterator[None]:
        """Watches one call of ``fit``, ``validate``, ``test`` or ``predict`` in this process."""
        watched = self._watched = _Watched(trainer)
        try:
            yield
        except BaseException as error:
            replacement = watched.failed(error)
            if replacement is not None:
                raise replacement from error
            raise
        else:
            watched.finish()
        finally:
            self._watched = None
            watched.close()


class _Watched:
    """One watched call: the guard, if it could be made, and what it listens to.

    The guard must never hurt the run it guards: whatever fails in here is said once, and the guard is off.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer_probe = TrainerProbe(trainer)
        self.tracker = PhaseTracker()
        self._trainer = trainer
        self._guard: Guard | None = None

    def begin(self, strategy: _GuardedStrategy) -> None:
        """Starts the guard. There is no process group, and so no store, yet."""
        self._unharmed(lambda: self._begin(strategy))

    def connect(self, strategy: _GuardedStrategy) -> None:
        """Goes over to the job's store, which exists now, and says that the guard is on."""
        self._unharmed(lambda: self._connect(strategy))

    def failed(self, error: BaseException) -> CollectiveTimeoutError | None:
        """Tells the other ranks; returns the error to raise instead, if there is a better one."""
        return self._leaving(lambda guard: guard.failed(error))

    def finish(self) -> None:
        """Waits until all ranks have finished."""
        self._leaving(lambda guard: guard.finish())

    def close(self) -> None:
        """Leaves nothing behind."""
        self._unharmed(self.tracker.detach)
        self._leaving(lambda guard: guard.close())

    def _begin(self, strategy: _GuardedStrategy) -> None:
        self.tracker.attach(self._trainer.profiler)
        place = _place(strategy)
        self._guard = Guard(
            place=place,
            limits=strategy._limits,
            report_dir=self._report_dir(strategy),
            exchange=self._files(strategy, _meeting_place(strategy)) if place.world_size > 1 else MemoryExchange(),
            probe=RankProbe(
                rank=place.rank, local_rank=place.local_rank, tracker=self.tracker, trainer=self.trainer_probe
            ),
            kill_launched=lambda: strategy.launcher.kill(signal.SIGKILL) if strategy.launcher is not None else None,
        )
        self._guard.start()

    def _connect(self, strategy: _GuardedStrategy) -> None:
        if self._guard is None:
            return
        limits, world_size = strategy._limits, strategy.world_size
        self._guard.connect(self._store(strategy) if world_size > 1 else MemoryExchange())
        if strategy.global_rank == 0:
            say_on_stderr(
                f"watching {world_size} rank{'s' if world_size > 1 else ''}: asks why after"
                f" {limits.suspect_after_s:g} s without progress, {limits.on_timeout}s after {limits.timeout_s:g} s;"
                f" reports go to {self._report_dir(strategy)}"
            )

    def _store(self, strategy: _GuardedStrategy) -> Exchange:
        store = TcpStoreExchange(_torch.own_store_connection(f"ncclsafe/{next(_calls)}"))
        # A name that no other job, nor an earlier start of this one, has used.
        run = store.set_if_absent("run", uuid.uuid4().hex[:12].encode()).decode()
        return FallbackExchange(store, self._files(strategy, run))

    def _files(self, strategy: _GuardedStrategy, name: str) -> DirectoryExchange:
        return DirectoryExchange(self._report_dir(strategy) / f".exchange-{name}")

    def _report_dir(self, strategy: _GuardedStrategy) -> Path:
        return report_folder(strategy._report_dir, self._trainer.default_root_dir)

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
        except CollectiveTimeoutError:
            raise
        except Exception as error:
            say_own_failure(error)
            guard, self._guard = self._guard, None
            if guard is not None:
                with suppress(Exception):
                    guard.close()
            return None


def _place(strategy: _GuardedStrategy) -> Place:
    """Which rank this is, from before the strategy has set it."""
    environment, devices = strategy.cluster_environment, strategy.parallel_devices
    assert environment is not None and devices is not None
    return Place(
        rank=strategy.node_rank * len(devices) + strategy.local_rank,
        local_rank=strategy.local_rank,
        world_size=len(devices) * int(getattr(strategy, "num_nodes", 1)),
        local_world_size=len(devices),
        master_port=str(environment.main_port),
    )


def _meeting_place(strategy: _GuardedStrategy) -> str:
    """A name on which the ranks of this start of this job agree without having met."""
    environment = strategy.cluster_environment
    assert environment is not None
    start = [os.environ[name] for name in _START_NAMES if name in os.environ]
    return "-".join([environment.main_address, str(environment.main_port), *start])


@dataclass(frozen=True)
class _GuardedFunction:
    """A Trainer's function that is watched where it runs; a class, so that it can be sent to a spawned process."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trainer = getattr(self.function, "__self__", None)
        strategy = getattr(trainer, "strategy", None)
        if not isinstance(strategy, _GuardedStrategy):
            return self.function(*args, **kwargs)
        with strategy._watch(trainer):
            return self.function(*args, **kwargs)


class _GuardedSubprocessLauncher(_SubprocessScriptLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(_GuardedFunction(function), *args, **kwargs)


class _GuardedMultiProcessingLauncher(_MultiProcessingLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(_GuardedFunction(function), *args, **kwargs)


_GUARDED_LAUNCHERS: dict[type, type] = {
    _SubprocessScriptLauncher: _GuardedSubprocessLauncher,
    _MultiProcessingLauncher: _GuardedMultiProcessingLauncher,
}


class SafeDDP(_GuardedStrategy, DDPStrategy):
    """:class:`~lightning.pytorch.strategies.DDPStrategy` that says why ranks wait, and ends a run that cannot go on.

    Args:
        suspect_after: How long a rank may wait without progress before all ranks are asked what they are doing and a
            report is written: a ``timedelta``, or seconds. Training is left alone. None means 60 s, or half of
            ``timeout`` if that is less.
        on_timeout: What happens when a rank has waited for ``timeout``. ``"abort"``: the final report is written,
            then the run ends with a non-zero exit on every rank. ``"report"``: only the report is written, and the
            back end's own timeout, 15 s later, ends the run.
        report_dir: The folder that reports go to, one folder in it for each incident; made when there is one. None
            means ``<trainer.default_root_dir>/ncclsafe``.
        **kwargs: Everything that ``DDPStrategy`` takes. ``timeout`` (a ``timedelta``; by default, and for None, 30
            minutes) keeps its meaning of a hard limit.

    Raises:
        ValueError: If ``suspect_after`` is not longer than 0, or not shorter than ``timeout``, or if ``on_timeout``
            is unknown.

    Example::

        trainer = L.Trainer(devices=4, strategy=SafeDDP(timeout=timedelta(minutes=10)))
    """

    def __init__(
        self,
        *,
        suspect_after: timedelta | float | None = None,
        on_timeout: OnTimeout = "abort",
        report_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._guard_with(suspect_after, on_timeout, report_dir)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``"ddp_ncclsafe"``; the parent's names are the parent's."""
        # Overriding is for a package that is loaded twice, as notebooks do.
        strategy_registry.register(
            "ddp_ncclsafe", cls, description="DDP strategy that says why ranks wait", override=True
        )


# Lightning has no entry point for strategies: a name exists once somebody has registered it.
SafeDDP.register_strategies(StrategyRegistry)
