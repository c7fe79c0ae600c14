"""What a user may set: one clear error for everything else, also by way of the strategy."""

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from guard_of import guard_of

from lightning_ncclsafe import SafeDDP
from lightning_ncclsafe.settings import Limits, check_limits, report_folder

MINUTE = timedelta(minutes=1)


def test_the_default_is_half_an_hour_with_an_adaptive_suspicion() -> None:
    assert check_limits(None, None, "abort") == Limits(
        suspect_after_s=60.0, timeout_s=1800.0, on_timeout="abort", learned=True
    )


@pytest.mark.parametrize(("timeout_s", "suspect_after_s"), [(20, 10), (119, 59.5), (120, 60), (7200, 60)])
def test_a_short_timeout_halves_suspect_after(timeout_s: float, suspect_after_s: float) -> None:
    assert check_limits(None, timedelta(seconds=timeout_s), "report").suspect_after_s == suspect_after_s


@pytest.mark.parametrize(
    ("phases", "shortest_s", "longest_s"),
    [
        (None, 90.0, 90.0),
        ({"checkpoint": 1200.0}, 90.0, 1200.0),
        ({"checkpoint": 1200.0, "train": 60.0}, 60.0, 1200.0),
        ({"train": 60.0}, 60.0, 90.0),
    ],
)
def test_the_limits_of_all_phases_are_between_two(
    phases: dict[str, float] | None, shortest_s: float, longest_s: float
) -> None:
    limits = check_limits(None, 90.0, "abort", phases or {})
    assert (limits.shortest_s, limits.longest_s) == (shortest_s, longest_s)


@pytest.mark.parametrize("suspect_after", [30, 30.0, timedelta(seconds=30)])
@pytest.mark.parametrize("timeout", [90, 90.0, timedelta(seconds=90)])
def test_durations_and_seconds_are_equivalent(suspect_after: Any, timeout: Any) -> None:
    limits = check_limits(suspect_after, timeout, "report")
    assert limits == Limits(suspect_after_s=30.0, timeout_s=90.0, on_timeout="report")
    assert type(limits.suspect_after_s) is type(limits.timeout_s) is float


BAD_SUSPECT_AFTER = [
    (0, "suspect_after=0 must be longer than 0 s"),
    (-1.5, "suspect_after=-1.5 must be longer than 0 s"),
    (timedelta(seconds=-1), "suspect_after=datetime.timedelta(days=-1, seconds=86399) must be longer than 0 s"),
    (math.nan, "suspect_after=nan must be longer than 0 s and at most 1e+09 s"),
    (math.inf, "suspect_after=inf must be longer than 0 s and at most 1e+09 s"),
    (10**400, "must be longer than 0 s and at most 1e+09 s"),
    (60, "suspect_after=60 is 60 s, but it must be less than timeout=datetime.timedelta(seconds=60) (60 s)"),
    (timedelta(hours=1), "is 3600 s, but it must be less than timeout="),
    ("30", "suspect_after='30' is a str; it must be a timedelta or a number of seconds"),
    (True, "suspect_after=True is a bool; it must be a timedelta or a number of seconds"),
    ([30], "suspect_after=[30] is a list; it must be"),
]


@pytest.mark.parametrize(("suspect_after", "said"), BAD_SUSPECT_AFTER)
def test_suspect_after_is_checked(suspect_after: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_limits(suspect_after, MINUTE, "abort")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("timeout", "said"),
    [
        (timedelta(0), "timeout=datetime.timedelta(0) must be longer than 0 s"),
        (-1, "timeout=-1 must be longer than 0 s"),
        (math.nan, "timeout=nan must be longer than 0 s"),
        (math.inf, "timeout=inf must be longer than 0 s and at most 1e+09 s"),
        ("1h", "timeout='1h' is a str; it must be a timedelta or a number of seconds"),
        (False, "timeout=False is a bool"),
    ],
)
def test_timeout_is_checked(timeout: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_limits(None, timeout, "abort")
    assert said in str(caught.value)


@pytest.mark.parametrize("on_timeout", ["", "Abort", "kill", None, True, ["abort"], {}])
def test_on_timeout_is_checked(on_timeout: Any) -> None:
    with pytest.raises(ValueError) as caught:
        check_limits(None, None, on_timeout)
    assert str(caught.value) == f"on_timeout={on_timeout!r} is unknown; it must be 'abort' or 'report'."


@pytest.mark.parametrize(("suspect_after", "said"), BAD_SUSPECT_AFTER)
def test_the_strategy_checks_suspect_after(suspect_after: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        SafeDDP(suspect_after=suspect_after, timeout=MINUTE)
    assert said in str(caught.value)


def test_the_strategy_checks_the_others() -> None:
    with pytest.raises(ValueError, match="on_timeout='kill' is unknown"):
        SafeDDP(on_timeout="kill")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout=datetime\.timedelta\(0\) must be longer"):
        SafeDDP(timeout=timedelta(0))


def test_strategy_defaults_are_valid_and_its_timeout_counts() -> None:
    assert guard_of(SafeDDP()).limits == check_limits(None, None, "abort")
    assert guard_of(SafeDDP(timeout=None)).limits.timeout_s == 1800.0
    assert guard_of(SafeDDP(timeout=timedelta(seconds=30))).limits.suspect_after_s == 15.0


def test_the_report_folder_defaults_to_the_trainers() -> None:
    assert report_folder(None, "/runs") == Path("/runs/ncclsafe")
    assert report_folder("here", "/runs") == report_folder(Path("here"), "/runs") == Path("here")
