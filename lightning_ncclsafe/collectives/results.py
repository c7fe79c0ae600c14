"""Shows what was timed: in loggers, on the terminal, as a trace."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchmetrics import MeanMetric

from lightning_ncclsafe.report.heat_map import heat_map
from lightning_ncclsafe.report.lines import WIDTH
from lightning_ncclsafe.report.tables.timing import render_timing
from lightning_ncclsafe.report.terminal import room_on_stderr, say_on_stderr, say_own_failure
from lightning_ncclsafe.report.trace.collectives import write_trace
from lightning_ncclsafe.settings import TimerSettings
from lightning_ncclsafe.timing.analysis import Analysis
from lightning_ncclsafe.timing.history import LatenessHistory
from lightning_ncclsafe.timing.lateness import Lateness
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.stragglers import LEAST_STEPS
from lightning_ncclsafe.timing.summary import TimingSummary, bandwidth

# MLflow accepts no other characters in the name of a metric.
_REFUSED = re.compile(r"[^\w./\-: ]")
# A program may create groups for as long as it runs, and loggers keep every name.
_MOST_NAMES = 256


class TimingScalars:
    """Collects scalars between two calls of :meth:`take`; used by one thread."""

    def __init__(self, world_size: int) -> None:
        # Never synchronised: these are all ranks' numbers already, and torchmetrics would use the training's groups. In
        # double precision, whatever default Lightning has set for the model.
        self._means: dict[str, Any] = defaultdict(lambda: MeanMetric(sync_on_compute=False).set_dtype(torch.float64))
        self._updated: set[str] = set()
        self._late_s = np.zeros(world_size)
        self._steps: set[int] = set()
        self._names: set[str] = set()

    def add(self, calls: MatchedCalls, late: Lateness) -> None:
        """Adds a block of collectives."""
        for number in np.unique(calls.op):
            chosen = calls.op == number
            timed = chosen & (late.transfer_ns >= 0)
            name = self._name(calls.group.name, calls.ops[number])
            self._update(f"{name}/skew_ms", late.skew_ns[chosen] / 1e6)
            self._update(f"{name}/wait_ms", late.wait_ns[:, chosen].mean(axis=0) / 1e6)
            self._update(f"{name}/size_bytes", calls.size_bytes[chosen].astype(float))
            if timed.any():
                self._update(f"{name}/transfer_ms", late.transfer_ns[timed] / 1e6)
                found = bandwidth(
                    calls.ops[number],
                    ranks=len(calls.group.ranks),
                    size_bytes=float(calls.size_bytes[timed].mean()),
                    seconds=float(late.transfer_ns[timed].mean() / 1e9),
                )
                if found is not None:
                    self._update(f"{name}/busbw_gb_per_s", np.array([found.bus / 1e9]))
        np.add.at(self._late_s, np.array(calls.group.ranks), late.late_ns.sum(axis=1) / 1e9)
        self._steps.update(calls.step.tolist())

    def take(self) -> dict[str, float]:
        """Everything since the last call, by name; empty if there was nothing."""
        if not self._updated:
            return {}
        found = {name: float(self._means[name].compute()) for name in sorted(self._updated)}
        latest = int(self._late_s.argmax())
        found["straggler/rank"] = float(latest)
        found["straggler/late_ms_per_step"] = float(self._late_s[latest]) * 1e3 / max(len(self._steps), 1)
        for name in self._updated:
            self._means[name].reset()
        self._updated.clear()
        self._steps.clear()
        self._late_s[:] = 0
        return found

    def _name(self, group: str, op: str) -> str:
        """``"collectives/all_reduce"``; for any other than the default group with its name: ``"collectives/reduce.7"``.

        All later groups share one name: ``"collectives/reduce.later"``.
        """
        name = _REFUSED.sub("_", f"collectives/{op}" if group == "0" else f"collectives/{op}.{group}")
        if name not in self._names and len(self._names) >= _MOST_NAMES:
            return _REFUSED.sub("_", f"collectives/{op}.later")
        self._names.add(name)
        return name

    def _update(self, name: str, values: Any) -> None:
        # The mean of a block, with its weight: one update costs a tenth of a millisecond.
        self._updated.add(name)
        self._means[name].update(float(values.mean()), weight=len(values))


_TABLE, _TRACE = "collectives.txt", "trace.json.gz"
_HEAT_MAP = "straggler/late_s_by_rank_and_time"


def log_scalars(
    scalars: dict[str, float], loggers: Iterable[Any], step: int, *, besides: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Gives scalars to the Trainer's loggers; on rank 0.

    Args:
        scalars: Values by name; nothing is logged where there are none.
        besides: Classes of loggers to skip.

    Returns:
        Classes of loggers that failed, for which a line was printed.
    """
    chosen = [logger for logger in loggers if type(logger).__name__ not in besides] if scalars else []
    return _each(chosen, lambda logger: logger.log_metrics(scalars, step=step))


def log_heat_map(history: LatenessHistory, loggers: Iterable[Any], step: int) -> None:
    """Gives a picture of lateness by rank and time to those loggers that accept pictures; on rank 0."""
    if not history.late_s.size:
        return
    picture = heat_map(history.late_s, bin_s=history.bin_ns / 1e9)

    def log(logger: Any) -> None:
        experiment = getattr(logger, "experiment", None)
        if callable(getattr(experiment, "add_image", None)):
            experiment.add_image(_HEAT_MAP, picture, step, dataformats="HWC")  # type: ignore[union-attr]
        elif callable(getattr(logger, "log_image", None)):
            logger.log_image(_HEAT_MAP, [picture], step=step)

    _each(loggers, log)


def save(analysis: Analysis, summary: TimingSummary, report_dir: Path, settings: TimerSettings) -> str:
    """Writes the table and the trace if they are wanted; on rank 0.

    Returns:
        A line with the trace's path; empty without a trace.
    """
    folder = report_dir / "collectives"
    try:
        if settings.table or settings.trace:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            now = datetime.now(tz=timezone.utc)
            names = (f"{now:%Y-%m-%dT%H-%M-%S}Z{f'-{number}' if number else ''}-" for number in count())
            # Fit and validate may end in the same second.
            taken = {path.name for path in folder.iterdir()}
            name = next(name for name in names if taken.isdisjoint((f"{name}{_TABLE}", f"{name}{_TRACE}")))
        if settings.table:
            table = folder / f"{name}{_TABLE}"
            table.touch(mode=0o600)
            table.write_text(f"{_table(summary)}\n", encoding="utf-8")
        if settings.trace:
            trace = folder / f"{name}{_TRACE}"
            write_trace(
                trace,
                calls=[*analysis.worst.blocks, *analysis.calls.blocks],
                spans=analysis.worst.spans_with(analysis.spans.by_rank),
                summary=summary,
                forgotten=analysis.forgotten,
            )
            return f"trace: {trace} (open it at https://ui.perfetto.dev)"
    except OSError as error:
        say_on_stderr(f"the timings of collectives could not be written to {folder}: {error}")
    return ""


def print_table(summary: TimingSummary, where: str) -> None:
    """Prints the table, and below it the line about the trace; on rank 0. After too few steps, prints nothing."""
    if summary.steps >= LEAST_STEPS:
        say_on_stderr("\n".join(filter(None, [_table(summary, room_on_stderr()), where])))


def print_trace(summary: TimingSummary, where: str) -> None:
    """Prints the line on the trace alone, of a run that has ended early; too few steps have none either."""
    if where and summary.steps >= LEAST_STEPS:
        say_on_stderr(where)


def _table(summary: TimingSummary, width: int = WIDTH) -> str:
    return f"collectives of {summary.steps:,} steps\n{render_timing(summary, width)}"


def _each(loggers: Iterable[Any], log: Callable[[Any], None]) -> frozenset[str]:
    failed = set()
    for logger in loggers:
        try:
            log(logger)
        except Exception as error:  # a logger's own; training and the other loggers continue
            failed.add(type(logger).__name__)
            say_own_failure(error, what=f"logging collectives to {type(logger).__name__}")
    return frozenset(failed)
