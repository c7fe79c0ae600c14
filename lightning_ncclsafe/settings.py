"""What a user may set, checked once: an error names the argument, the value and what is allowed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

OnTimeout = Literal["abort", "report"]
OnMismatch = Literal["raise", "raise_on_hang", "warn"]
Content = Literal["sample", "full", "off"]
OnUneven = Literal["raise", "stop_together", "repeat"]
Overflow = Literal["thin", "drop_oldest", "block"]
OnProblem = Literal["warn", "raise"]

# Long enough for a first batch, a short evaluation or a checkpoint on most jobs; short compared with half an hour.
DEFAULT_SUSPECT_AFTER_S = 60.0
# PyTorch's own default for back ends other than NCCL, and Lightning's for all of them.
DEFAULT_TIMEOUT_S = 1800.0
# About 31 years; Lightning calls 27 infinite, and PyTorch counts milliseconds.
_LONGEST_S = 1e9
# How much longer the process groups' own timeout is than the user's, so that the report always comes first.
BACKSTOP_S = 15.0
# A queue shorter than this would drop what one validation logs.
_LEAST_LIMIT_BYTES = 1 << 20
# One point of a tag in ten minutes; of each window three are kept.
_LEAST_RATE = 1 / 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When ranks are asked, and when the run is ended.

    Attributes:
        suspect_after_s: Seconds without progress after which the ranks are asked for their facts. If ``learned``, only
            other periods are derived from it.
        timeout_s: Seconds without progress after which the run is ended.
        on_timeout: Whether the run is ended then (``"abort"``), or only reported on (``"report"``).
        learned: Whether the run itself shows after how long the ranks are to be asked.
        phases_s: In place of ``timeout_s``, by names of :class:`~lightning_ncclsafe.PhaseTimeouts`' arguments; empty
            if the user sets none.
    """

    suspect_after_s: float
    timeout_s: float
    on_timeout: OnTimeout
    learned: bool = False
    phases_s: Mapping[str, float] = field(default_factory=dict)

    def limit_s(self, phase: str) -> float:
        """The hard limit of a phase, by its name among ``PhaseTimeouts``' arguments; seconds."""
        return self.phases_s.get(phase, self.timeout_s)

    @property
    def longest_s(self) -> float:
        """The longest hard limit of all phases, seconds."""
        return max(self.timeout_s, *self.phases_s.values()) if self.phases_s else self.timeout_s

    @property
    def shortest_s(self) -> float:
        """The shortest hard limit of all phases, seconds."""
        return min(self.timeout_s, *self.phases_s.values()) if self.phases_s else self.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementSettings:
    """What ranks do about their data; see :class:`~lightning_ncclsafe.DatasetAgreement`.

    Attributes:
        on_mismatch: Whether ranks that disagree about their data raise, raise only if they would hang, or warn.
        content: How much of the data's content is compared.
        on_uneven: What happens if one rank's data ends before another's.
    """

    on_mismatch: OnMismatch = "raise"
    content: Content = "sample"
    on_uneven: OnUneven = "raise"

    def __post_init__(self) -> None:
        _check_choice("on_mismatch", self.on_mismatch, OnMismatch)
        _check_choice("content", self.content, Content)
        _check_choice("on_uneven", self.on_uneven, OnUneven)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """How loggers are taken off the training thread; see :class:`~lightning_ncclsafe.LoggerOffload`.

    Attributes:
        max_points_per_s: How many points of a tag reach storage per second at most; None for no limit.
        overflow: What happens when a limit is reached.
        block_s: How long a call may wait with ``"block"``, seconds.
        memory_limit_bytes: How many bytes of a logger may wait in memory.
        disk_limit_bytes: How many bytes of a logger may wait in local staging.
        finalize_s: How long the end of a run waits for storage, seconds.
        staging_dir: The folder of local staging.
    """

    max_points_per_s: float | None
    overflow: Overflow
    block_s: float
    memory_limit_bytes: int
    disk_limit_bytes: int
    finalize_s: float
    staging_dir: Path

    def __post_init__(self) -> None:
        _check_choice("overflow", self.overflow, Overflow)
        _check_amount("memory_limit_bytes", self.memory_limit_bytes, _LEAST_LIMIT_BYTES)
        _check_amount("disk_limit_bytes", self.disk_limit_bytes, _LEAST_LIMIT_BYTES)
        if self.max_points_per_s is not None:
            _check_amount("max_points_per_second", self.max_points_per_s, _LEAST_RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerSettings:
    """How collectives are timed, and what is written; see :class:`~lightning_ncclsafe.CollectiveTimer`.

    Attributes:
        every_n_steps: After how many steps ranks share what they have recorded, and scalars are logged.
        table: Whether a table is written at the end, and that of ``fit`` printed.
        trace: Whether a trace is written at the end.
        heat_map: Whether a heat map of lateness is logged at the end.
    """

    every_n_steps: int = 50
    table: bool = True
    trace: bool = True
    heat_map: bool = True

    def __post_init__(self) -> None:
        _check_count("every_n_steps", self.every_n_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """What is done about loader workers; see :class:`~lightning_ncclsafe.LoaderTuner`.

    Attributes:
        apply: Whether settings are changed, or only advised.
        apply_to_iterables: Whether that applies to iterable datasets, too.
        apply_to_seeded: Whether that applies to seeded runs, too.
    """

    apply: bool = True
    apply_to_iterables: bool = False
    apply_to_seeded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightSettings:
    """What is done about problems of hosts; see :class:`~lightning_ncclsafe.HostPreflight`.

    Attributes:
        on_problem: Whether a problem that would make the run fail raises, or warns.
        data_dir: Where data is read from; None to skip this check.
    """

    on_problem: OnProblem = "warn"
    data_dir: str | None = None

    def __post_init__(self) -> None:
        _check_choice("on_problem", self.on_problem, OnProblem)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """What is saved of a run that is being ended; see :class:`~lightning_ncclsafe.JustInTimeCheckpoint`.

    Attributes:
        dirpath: The folder of these checkpoints.
        resume: Whether ``fit`` without ``ckpt_path`` resumes from the newest complete checkpoint.
        keep: How many of these checkpoints are kept.
        grace_s: Seconds that the scheduler leaves between its signal and the end of the processes.
        run: Name of the run, unique; a run that resumes from a checkpoint has the name of the run that saved it.
    """

    dirpath: Path
    resume: bool = False
    keep: int = 2
    grace_s: float = 30.0
    run: str = ""

    def __post_init__(self) -> None:
        _check_count("keep", self.keep)


def check_limits(
    suspect_after: timedelta | float | None,
    timeout: timedelta | float | None,
    on_timeout: str,
    phases_s: Mapping[str, float] | None = None,
) -> Limits:
    """The limits of the strategies' arguments.

    Args:
        suspect_after: A duration, or seconds; None to learn it from the run.
        timeout: A duration, or seconds; None for 30 minutes.
        on_timeout: ``"abort"`` or ``"report"``.
        phases_s: As in :class:`Limits`; checked already.

    Raises:
        ValueError: Naming the argument, the value and what is allowed.
    """
    timeout_s = DEFAULT_TIMEOUT_S if timeout is None else seconds("timeout", timeout)
    if suspect_after is None:
        suspect_after_s = min(DEFAULT_SUSPECT_AFTER_S, timeout_s / 2)
    else:
        suspect_after_s = seconds("suspect_after", suspect_after)
    if suspect_after_s >= timeout_s:
        raise ValueError(
            f"suspect_after={suspect_after!r} is {suspect_after_s:g} s, but it must be less than timeout={timeout!r}"
            f" ({timeout_s:g} s): ranks are first asked what they are doing, then the run is ended."
        )
    _check_choice("on_timeout", on_timeout, OnTimeout)
    return Limits(
        suspect_after_s=suspect_after_s,
        timeout_s=timeout_s,
        on_timeout=on_timeout,  # type: ignore[arg-type]
        learned=suspect_after is None,
        phases_s=phases_s or {},
    )


def report_folder(report_dir: str | Path | None, default_root_dir: str | Path) -> Path:
    """The folder that reports go to: ``report_dir``, or ``<default_root_dir>/ncclsafe``.

    If ``default_root_dir`` is remote (``"s3://…"``), the current directory takes its place.
    """
    if report_dir is not None:
        return Path(report_dir)
    return Path("." if "://" in str(default_root_dir) else default_root_dir) / "ncclsafe"


def _check_choice(name: str, value: object, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        words = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ValueError(f"{name}={value!r} is unknown; it must be {words}.")


def _check_amount(name: str, value: object, least: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value < float("inf"):  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} must be a number of at least {least:.6g}.")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")


def seconds(name: str, value: timedelta | float) -> float:
    """A duration in seconds.

    Args:
        name: The argument's name, for the error.
        value: A duration, or seconds.

    Raises:
        ValueError: If it is neither, or not longer than 0 and at most 1e9 s.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(value, timedelta) and not is_number:
        raise ValueError(
            f"{name}={value!r} is a {type(value).__name__}; it must be a timedelta or a number of seconds."
        )
    found = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 < found <= _LONGEST_S:
        raise ValueError(f"{name}={value!r} must be longer than 0 s and at most {_LONGEST_S:g} s.")
    return float(found)


@dataclass(frozen=True, kw_only=True)
class PhaseTimeouts:
    """How long a rank may wait without progress, phase by phase, before the run is ended.

    The limit is that of the phase in which a rank waits. It applies to the guard and, 15 s later, to the back end of
    every process group, from the beginning of the phase. A group that was created with a longer timeout keeps it;
    exactly 10 or 30 minutes, PyTorch's defaults, do not count as such.

    Args:
        init: Until the first batch or sanity check: creation of the process group, setup, restoring.
        sanity_check: Validation before training.
        first_batch: Until the end of the first training batch of each epoch: workers start, models are compiled.
        train: Training otherwise, hooks at an epoch's end included.
        validate: Validation.
        test: Testing.
        predict: Prediction.
        checkpoint: While a checkpoint is saved, in any phase.

    Each is a ``timedelta``, or seconds; None, the default, means the strategy's own ``timeout``.

    Raises:
        ValueError: Naming the argument, if it is not longer than 0 s or longer than 1e9 s.

    Example::

        SafeDDP(phase_timeouts=PhaseTimeouts(init=300, train=100, checkpoint=timedelta(minutes=20)))
    """

    # The number comes first, here and elsewhere: LightningCLI saves a value as the first type that accepts it, and a
    # timedelta would be saved as the text '300.0'.
    init: float | timedelta | None = None
    sanity_check: float | timedelta | None = None
    first_batch: float | timedelta | None = None
    train: float | timedelta | None = None
    validate: float | timedelta | None = None
    test: float | timedelta | None = None
    predict: float | timedelta | None = None
    checkpoint: float | timedelta | None = None

    def __post_init__(self) -> None:
        self.as_seconds()

    def as_seconds(self) -> dict[str, float]:
        """The limits that are set, in seconds, by argument."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: seconds(name, value) for name, value in given.items() if value is not None}
