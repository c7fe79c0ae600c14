"""Where people look at what was timed: loggers, the terminal, a trace."""

from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

from lightning_ncclsafe.report.heat_map import heat_map
from lightning_ncclsafe.report.lines import WIDTH
from lightning_ncclsafe.report.tables.timing import render_timing
from lightning_ncclsafe.report.terminal import room_on_stderr, say_on_stderr, say_own_failure
from lightning_ncclsafe.report.trace.collectives import write_trace
from lightning_ncclsafe.settings import TimerSettings
from lightning_ncclsafe.timing.analysis import Analysis
from lightning_ncclsafe.timing.history import LatenessHistory
from lightning_ncclsafe.timing.stragglers import LEAST_STEPS
from lightning_ncclsafe.timing.summary import TimingSummary

_TABLE, _TRACE = "collectives.txt", "trace.json.gz"
_HEAT_MAP = "straggler/late_s_by_rank_and_time"


def log_scalars(
    scalars: dict[str, float], loggers: Iterable[Any], step: int, *, besides: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Gives scalars to the Trainer's loggers; on rank 0.

    Args:
        scalars: Values by name; nothing is logged where there are none.
        loggers: The loggers.
        step: The Trainer's global step.
        besides: Classes of loggers that get nothing.

    Returns:
        Classes of loggers that have failed; a line says so.
    """
    chosen = [logger for logger in loggers if type(logger).__name__ not in besides] if scalars else []
    return _each(chosen, lambda logger: logger.log_metrics(scalars, step=step))


def log_heat_map(history: LatenessHistory, loggers: Iterable[Any], step: int) -> None:
    """Gives a picture of lateness by rank and time to those loggers that take pictures; on rank 0."""
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
    """Writes the table and the trace, as far as they are wanted; on rank 0.

    Returns:
        A line that says where the trace is; empty where there is none.
    """
    folder = report_dir / "collectives"
    try:
        if settings.table or settings.trace:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            name = _free_name(folder)
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
    """Prints the table, with a line on the trace below it; on rank 0. Too few steps have none."""
    if summary.steps >= LEAST_STEPS:
        say_on_stderr("\n".join(filter(None, [_table(summary, room_on_stderr()), where])))


def print_trace(summary: TimingSummary, where: str) -> None:
    """Prints the line on the trace alone, of a run that has ended early; too few steps have none either."""
    if where and summary.steps >= LEAST_STEPS:
        say_on_stderr(where)


def _table(summary: TimingSummary, width: int = WIDTH) -> str:
    return f"collectives of {summary.steps:,} steps\n{render_timing(summary, width)}"


def _free_name(folder: Path) -> str:
    """By the time; fit and validate may end in the same second."""
    now = datetime.now(tz=timezone.utc)
    names = (f"{now:%Y-%m-%dT%H-%M-%S}Z{f'-{number}' if number else ''}-" for number in count())
    return next(name for name in names if not any((folder / f"{name}{end}").exists() for end in (_TABLE, _TRACE)))


def _each(loggers: Iterable[Any], log: Callable[[Any], None]) -> frozenset[str]:
    failed = set()
    for logger in loggers:
        try:
            log(logger)
        except Exception as error:  # a logger's own; training and the other loggers go on
            failed.add(type(logger).__name__)
            say_own_failure(error, what=f"logging collectives to {type(logger).__name__}")
    return frozenset(failed)
