"""Lightning's strategies with the guard plugged in: nothing but the plugging."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_ncclsafe.collectives.attaching import AttachedTimer
from lightning_ncclsafe.phase_timeouts import PhaseTimeouts
from lightning_ncclsafe.settings import BACKSTOP_S, Limits, OnTimeout, check_limits
from lightning_ncclsafe.watched import WatchedCall


class _GuardedStrategy(ParallelStrategy):
    """What the strategies share. Stands before the strategy it guards in the order of inheritance."""

    _limits: Limits
    _timeout: timedelta | None
    _report_dir: str | Path | None
    _sigterm_broadcast = False
    _watched: WatchedCall | None = None

    def _guard_with(
        self,
        suspect_after: timedelta | float | None,
        on_timeout: OnTimeout,
        report_dir: str | Path | None,
        phase_timeouts: PhaseTimeouts | None = None,
    ) -> None:
        phases_s = phase_timeouts.as_seconds() if phase_timeouts is not None else {}
        self._limits = check_limits(suspect_after, self._timeout, on_timeout, phases_s)
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
        self._timeout = timedelta(seconds=self._limits.limit_s("init") + BACKSTOP_S)
        try:
            with watched.tracker.action("init_process_group"), watched.recorder():
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

    def process_dataloader(self, dataloader: object) -> object:
        """Lightning's hook for each loader, before its workers start; here those of all ranks are compared."""
        dataloader = super().process_dataloader(dataloader)
        return self._watched.prepared(dataloader) if self._watched is not None else dataloader

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Lightning's hook for each batch of validation; here ranks may stop on SIGTERM, as in the two below."""
        self._before_evaluation_batch()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Lightning's hook for each batch of testing."""
        self._before_evaluation_batch()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's hook for each batch of prediction."""
        self._before_evaluation_batch()
        return super().predict_step(*args, **kwargs)

    def _before_evaluation_batch(self) -> None:
        if self._watched is not None:
            self._watched.before_evaluation_batch()

    def __getstate__(self) -> dict[str, Any]:
        """Without the guard, which belongs to this process: a Trainer may be copied or sent away while it runs."""
        return {name: value for name, value in super().__getstate__().items() if name != "_watched"}

    @contextmanager
    def _watch(self, trainer: Any) -> Iterator[None]:
        """Watches one call of ``fit``, ``validate``, ``test`` or ``predict`` in this process."""
        watched = self._watched = WatchedCall(
            trainer,
            self._limits,
            self._report_dir,
            combined=CombinedLoader,
            sigterm_error=None if self._sigterm_broadcast else SIGTERMException,
        )
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


def timer_of(strategy: object) -> AttachedTimer | None:
    """What times the collectives of the call that a strategy is in; None where nothing does."""
    watched = strategy._watched if isinstance(strategy, _GuardedStrategy) else None
    return watched.timer if watched is not None else None


def guards(strategy: object) -> bool:
    """Whether a strategy is one of this package."""
    return isinstance(strategy, _GuardedStrategy)


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

    Ranks that disagree about their data do not start; see :class:`~lightning_ncclsafe.DatasetAgreement`.

    Args:
        suspect_after: How long a rank may wait without progress before all ranks are asked what they are doing and a
            report is written: a ``timedelta``, or seconds. Training is left alone. None means that this is learned
            from the run: several times what is usual in that phase, at least 10 s, at most half of the hard limit.
        on_timeout: What happens when a rank has waited for ``timeout``. ``"abort"``: the final report is written,
            then the run ends with a non-zero exit on every rank. ``"report"``: only the report is written, and the
            back end's own timeout, 15 s later, ends the run.
        report_dir: The folder that reports go to, one folder in it for each incident; made when there is one. None
            means ``<trainer.default_root_dir>/ncclsafe``.
        phase_timeouts: Hard limits that differ from phase to phase; see :class:`~lightning_ncclsafe.PhaseTimeouts`.
            None means ``timeout`` for all.
        sigterm_broadcast: True leaves Lightning's own handling of SIGTERM, with a broadcast before every training
            batch. By default the ranks agree beside the training on the batch before which all of them stop.
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
        phase_timeouts: PhaseTimeouts | None = None,
        sigterm_broadcast: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._guard_with(suspect_after, on_timeout, report_dir, phase_timeouts)
        self._sigterm_broadcast = sigterm_broadcast

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``"ddp_ncclsafe"``; the parent's names are the parent's."""
        # Overriding is for a package that is loaded twice, as notebooks do.
        strategy_registry.register(
            "ddp_ncclsafe", cls, description="DDP strategy that says why ranks wait", override=True
        )


# Lightning has no entry point for strategies: a name exists once somebody has registered it.
SafeDDP.register_strategies(StrategyRegistry)
