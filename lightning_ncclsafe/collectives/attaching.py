"""Lets a timer listen to one call of the Trainer; the Trainer is used by duck type, Lightning is not imported here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ncclsafe.code.patching import WrappedMethod
from lightning_ncclsafe.collectives.recording import PhaseHistory
from lightning_ncclsafe.collectives.results import print_trace, save
from lightning_ncclsafe.collectives.timer import Timer
from lightning_ncclsafe.exchange import Exchange
from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.probes.host.capacity import host_boot_id
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.settings import TimerSettings
from lightning_ncclsafe.timing.summary import LOG_METRICS


class AttachedTimer:
    """The timer of one call of the Trainer.

    Args:
        trainer: The ``Trainer``.
        tracker: What Lightning is doing.
        exchange: What the ranks share.
        settings: What the user has set.
        rank: This rank.
        world_size: Number of ranks.
        report_dir: The folder of reports.

    Attributes:
        timer: The timer.
        trace: A line that says where the trace is; empty before the end, and where there is none.
    """

    def __init__(
        self,
        trainer: Any,
        tracker: ActionTracker,
        exchange: Exchange,
        settings: TimerSettings,
        *,
        rank: int,
        world_size: int,
        report_dir: Path,
    ) -> None:
        self.trace = ""
        self._has_ended = False
        self._settings = settings
        self._report_dir = report_dir
        self._tracker = tracker
        self._phase_history = PhaseHistory()
        self.timer = Timer(
            settings,
            exchange,
            rank=rank,
            world_size=world_size,
            phase_history=self._phase_history,
            boot_id=host_boot_id(),
        )
        # Before anything is changed: threads may be what this process has too many of.
        self.timer.start()
        self._is_root = rank == 0
        connector = getattr(trainer, "_logger_connector", None)
        self._log_metrics = (
            WrappedMethod(connector, LOG_METRICS, self._log) if hasattr(connector, LOG_METRICS) else None
        )
        tracker.listeners += (self._phase_history,)

    def stragglers(self) -> tuple[Straggler, ...]:
        """Ranks that keep others waiting, as far as this rank knows."""
        return self.timer.stragglers

    def end(self) -> None:
        """Puts all ranks' last recordings together, once; rank 0 keeps what has come of it."""
        if self._has_ended:
            return
        self._has_ended = True
        self.timer.end()
        summary = self.timer.analysis.summary()
        if self._is_root and not self.timer.is_off and summary.ops:
            self.trace = save(self.timer.analysis, summary, self._report_dir, self._settings)

    def detach(self) -> None:
        """Everything it listened to is as it was. Where nobody has ended it, there was an error: the trace is kept."""
        self._tracker.listeners = tuple(
            listen for listen in self._tracker.listeners if listen is not self._phase_history
        )
        if self._log_metrics is not None:
            self._log_metrics.remove()
        if not self._has_ended:
            self.end()
            print_trace(self.timer.analysis.summary(), self.trace)

    def _log(self, log_metrics: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Lightning's profiler sees every hook, but not this."""
        with self._tracker.action(LOG_METRICS):
            return log_metrics(*args, **kwargs)
