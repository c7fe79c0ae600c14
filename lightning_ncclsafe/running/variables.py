"""What ``ncclsafe run`` and the environment set for the guard: one table of options, each with its variable."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from lightning_ncclsafe.report.lines import safe
from lightning_ncclsafe.settings import OnTimeout, PhaseTimeouts, check_limits, seconds

SWITCH = "NCCLSAFE"
ON = "1"
RECOMMENDED = "recommended"
CALLBACKS = (
    "HostPreflight",
    "DatasetAgreement",
    "LoaderTuner",
    "LoggerOffload",
    "CollectiveTimer",
    "JustInTimeCheckpoint",
)
"""This package's own, which need no module."""

_CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
# Characters of a value in an error.
_MOST_SHOWN = 80


@dataclass(frozen=True, kw_only=True)
class WantedCallback:
    """A callback to add to every Trainer.

    Attributes:
        name: One of this package, the path of a class, or ``recommended`` for all recommended ones.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One thing that may be set.

    Attributes:
        name: The argument of ``SafeDDP`` that it sets, or ``callbacks``.
        read: Makes the argument from its text; raises ValueError if the text is invalid.
        metavar: Its value, in one word.
    """

    name: str
    read: Callable[[str], Any]
    metavar: str
    help: str

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{SWITCH}_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The option of ``ncclsafe run``."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """All that was set.

    Attributes:
        callbacks: What is added to the callbacks of every Trainer.
        guard: Arguments of the strategy; those that are not set are missing.
    """

    callbacks: tuple[WantedCallback, ...]
    guard: Mapping[str, Any]


def wanted(environ: Mapping[str, str]) -> Wanted:
    """What an environment sets.

    Raises:
        ValueError: Naming the variable, its value and what is allowed.
    """
    if environ.get(SWITCH) != ON:
        raise ValueError(f"{SWITCH}={shown(environ.get(SWITCH, ''))} in the environment is unknown; it must be 1 or 0.")
    found: dict[str, Any] = {}
    for option in OPTIONS:
        # As with Lightning's own variables, an empty one is not set.
        if text := environ.get(option.variable):
            try:
                found[option.name] = option.read(text)
            except ValueError as error:
                raise ValueError(f"{option.variable}={shown(text)} in the environment: {error}") from None
    if "suspect_after" in found and "timeout" in found:
        check_limits(found["suspect_after"], found["timeout"], "abort")
    return Wanted(callbacks=found.pop("callbacks", ()), guard=found)


def shown(text: str) -> str:
    """A value as an error shows it, on one line."""
    return safe(repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"))


def _seconds(text: str) -> float:
    try:
        return seconds("it", float(text))
    except ValueError:
        raise ValueError("it must be a number of seconds, more than 0 and at most 1e9.") from None


def _on_timeout(text: str) -> str:
    if text not in get_args(OnTimeout):
        raise ValueError(f"it must be {' or '.join(get_args(OnTimeout))}.")
    return text


def _phase_timeouts(text: str) -> PhaseTimeouts:
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in PhaseTimeouts.__dataclass_fields__ or name in given:
            names = ", ".join(PhaseTimeouts.__dataclass_fields__)
            raise ValueError(f"it must be phases with seconds, as in init=600,train=100; the phases are {names}.")
        given[name] = _seconds(value)
    return PhaseTimeouts(**given)


def _callbacks(text: str) -> tuple[WantedCallback, ...]:
    if not text.lstrip().startswith("["):
        return tuple(_callback(name.strip()) for name in text.split(","))
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it starts like a JSON list, but is not valid JSON ({error}).") from None
    return tuple(_callback(entry) for entry in entries)


def _callback(entry: object) -> WantedCallback:
    given = {"class_path": entry} if isinstance(entry, str) else entry
    if isinstance(given, dict) and given.keys() <= {"class_path", "init_args"}:
        name, arguments = given.get("class_path"), given.get("init_args", {})
        is_known = isinstance(name, str) and (name in (*CALLBACKS, RECOMMENDED) or _CLASS_PATH.fullmatch(name))
        if is_known and isinstance(arguments, dict) and not (name == RECOMMENDED and arguments):
            return WantedCallback(name=str(name), arguments=arguments)
    raise ValueError(
        f"{shown(str(entry))} is not a callback; it must be {RECOMMENDED}, one of {', '.join(CALLBACKS)}, or a class"
        ' path. Give arguments in JSON: [{"class_path": "CollectiveTimer", "init_args": {"trace": false}}].'
    )


OPTIONS = (
    Option(
        name="callbacks",
        read=_callbacks,
        metavar="NAMES",
        help="callbacks to add to every Trainer: 'recommended', comma-separated names or class paths, or a JSON list"
        " with arguments",
    ),
    Option(
        name="suspect_after",
        read=_seconds,
        metavar="SECONDS",
        help="seconds without progress before ranks are asked what they are doing (default: learned)",
    ),
    Option(
        name="timeout",
        read=_seconds,
        metavar="SECONDS",
        help="the hard limit in seconds (default: that of the program's strategy)",
    ),
    Option(
        name="phase_timeouts",
        read=_phase_timeouts,
        metavar="PHASES",
        help="hard limits by phase, in seconds: init=600,train=100",
    ),
    Option(
        name="on_timeout",
        read=_on_timeout,
        metavar="ACTION",
        help="abort or report: what to do at the limit (default: abort)",
    ),
    Option(
        name="report_dir",
        read=str,
        metavar="DIRECTORY",
        help="where reports go (default: ncclsafe in the Trainer's default_root_dir)",
    ),
)
"""Everything that may be set."""
