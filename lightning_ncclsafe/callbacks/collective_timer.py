"""The callback that times collectives."""

from typing import Any

from lightning_ncclsafe._lightning import LightningModule, Trainer
from lightning_ncclsafe.callbacks.batch_hooks import without_batch_hooks
from lightning_ncclsafe.callbacks.declared import NeedsGuard
from lightning_ncclsafe.code.own_work import OwnWork
from lightning_ncclsafe.collectives.results import log_heat_map, log_scalars, print_table
from lightning_ncclsafe.collectives.timer import AttachedTimer
from lightning_ncclsafe.report.terminal import say_own_failure
from lightning_ncclsafe.settings import TimerSettings
from lightning_ncclsafe.strategies.guarded import timer_of


@without_batch_hooks
class CollectiveTimerHooks(NeedsGuard):
    """Times every collective of every process group, and names the rank that the others wait for.

    A separate thread reads PyTorch's Flight Recorder; it adds nothing to the training's collectives and synchronises
    nothing. The recordings of all ranks meet on rank 0, over the job's store. The shortest duration of a collective
    among the ranks is about what it takes (*transfer*); the rest is waiting for the last rank.

    Scalars go to the Trainer's loggers: ``collectives/<op>/…`` (``skew_ms``, ``wait_ms``, ``size_bytes`` and, if the
    back end times collectives on the device, as NCCL does, ``transfer_ms`` and ``busbw_gb_per_s`` as in nccl-tests),
    ``straggler/rank`` and ``straggler/late_ms_per_step``. One line names a rank that is late repeatedly, with the phase
    in which it falls behind; the first steps, and lateness that callbacks of this package cause, do not count. At the
    end of ``fit``, a table is printed if there were at least 50 steps, and a heat map of lateness by rank and time goes
    to loggers that accept images. ``<report_dir>/collectives`` has the table of every call, however short, as
    ``…-collectives.txt``, and ``…-trace.json.gz`` for https://ui.perfetto.dev.

    Args:
        every_n_steps: Ranks share what they have recorded, and log scalars, after about this many steps; at most twice
            a second and, in a large job, at most every 10 ms for each rank.
        table: Whether to write a table at the end, and print that of ``fit``.
        trace: Whether to write a trace at the end. It has the last three minutes, or with long steps the last MiB, at
            most 64 MiB, and before that the collectives at which ranks were furthest apart.
        heat_map: Whether to log a heat map of lateness at the end.

    Raises:
        ValueError: If ``every_n_steps`` is not a whole number of at least 1, or if a Trainer has two of these
            callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[CollectiveTimer()])
    """

    def __init__(
        self, *, every_n_steps: int = 50, table: bool = True, trace: bool = True, heat_map: bool = True
    ) -> None:
        self.settings = TimerSettings(every_n_steps=every_n_steps, table=table, trace=trace, heat_map=heat_map)
        self._loggers_that_failed: frozenset[str] = frozenset()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the scalars since the last call."""
        if trainer.global_step % self.settings.every_n_steps == 0:
            self._log(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Brings all ranks' last recordings together, and shows the results.

        After an exception this is not called; then the strategy keeps the trace.
        """
        attached = timer_of(trainer.strategy)
        if attached is None:
            return
        try:
            attached.end()
            if trainer.is_global_zero and not attached.timer.is_off:
                self._show(attached, trainer, is_fit=stage == "fit")
        except Exception as error:
            say_own_failure(error, what="writing the timings of collectives")

    def _log(self, trainer: Trainer) -> None:
        attached = timer_of(trainer.strategy)
        if attached is not None and trainer.is_global_zero:
            with OwnWork():
                self._loggers_that_failed |= log_scalars(
                    attached.timer.scalars(), trainer.loggers, trainer.global_step, besides=self._loggers_that_failed
                )

    def _show(self, attached: AttachedTimer, trainer: Trainer, *, is_fit: bool) -> None:
        self._log(trainer)
        if self.settings.heat_map:
            log_heat_map(attached.timer.analysis.history, trainer.loggers, trainer.global_step)
        if self.settings.table and is_fit:
            print_table(attached.timer.analysis.summary(), attached.trace)
