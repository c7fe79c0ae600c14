"""What a soak makes of its samples."""

import pytest
from soak import Sample, growths, minutes_of, verdict

EVERY_S = 10


def samples(minutes: int, **quantities: float) -> list[Sample]:
    """Of each quantity what it has in the first minute, and by how much it grows in each."""
    times = range(0, minutes * 60 + EVERY_S, EVERY_S)
    return [{"s": s, "steps": 20 * s, **{name: at(s / 60) for name, at in quantities.items()}} for s in times]  # type: ignore[operator]


def told(minutes: int, name: str, at: object) -> list[str]:
    return verdict(growths(minutes_of(samples(minutes, **{name: at}))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("memory of rank 0", lambda minute: 480e6 + 20e6 * min(minute, 4)),
        ("memory of rank 0", lambda minute: 480e6 + 0.06e6 * minute),
        ("memory of rank 0", lambda minute: 480e6 + 300e6 * (minute % 20 < 1)),
        ("open files", lambda minute: 58 + (minute % 7 < 1)),
        ("keys on the store", lambda minute: 40 - (minute // 1 % 2)),
        ("disk", lambda minute: 1e3 * minute),
    ],
    ids=["fills up", "within 5 MB", "for a moment", "one for a moment", "up and down", "a report now and then"],
)
def test_what_is_flat(name: str, at: object) -> None:
    assert told(65, name, at) == []


@pytest.mark.parametrize(
    ("name", "at", "said"),
    [
        ("memory of rank 0", lambda minute: 480e6 + 0.2e6 * minute, "by 12.0 MB an hour"),
        ("memory of rank 1", lambda minute: 480e6 + 10e6 * (minute > 30), "grew from 480.0 MB to 490.0 MB"),
        ("threads", lambda minute: 24 + minute // 20, "threads grew from 24 to 26"),
        ("keys on the store", lambda minute: 30 + minute, "by 60 an hour"),
    ],
)
def test_what_grows_is_named_with_how_fast(name: str, at: object, said: str) -> None:
    (line,) = told(66, name, at)
    assert line.startswith(name) and said in line


def test_of_a_short_run_nothing_is_claimed() -> None:
    (line,) = told(6, "threads", lambda minute: 24)
    assert line.startswith("too short")
