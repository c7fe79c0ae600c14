"""Of many points the smallest, the largest and the last are left, and the others are counted."""

import math
import random

import pytest

from lightning_ncclsafe.loggers.intake import LoggedScalars, Thinner

NAN = float("nan")
Point = tuple[int | None, float]


def scalars(step: int, **values: float) -> LoggedScalars:
    return LoggedScalars(step=step, values=values, created=1e9 + step)


def points(left: list[LoggedScalars], tag: str = "loss") -> list[Point]:
    return [(one.step, one.values[tag]) for one in left if tag in one.values]


def count(left: list[LoggedScalars]) -> int:
    return sum(len(one.values) for one in left)


def three_of(window: list[Point]) -> list[Point]:
    """The first smallest, the first largest and the last, by brute force."""
    smallest = min(window, key=lambda point: point[1])
    largest = max(window, key=lambda point: point[1])
    return sorted({smallest, largest, window[-1]}, key=window.index)


def walk(length: int, seed: int) -> list[float]:
    chance, value, values = random.Random(seed), 0.0, []
    for _ in range(length):
        value += chance.choice([-1.0, 0.0, 0.5, 1.0])
        values.append(value)
    return values


def test_by_default_everything_passes_unchanged() -> None:
    thinner = Thinner()
    for step in range(100):
        one = scalars(step, loss=1.0, acc=2.0)
        left = thinner.offer(one, now=0.0)
        assert len(left) == 1
        assert left[0] is one
    assert thinner.idle
    assert (thinner.thinned, thinner.due(1e9), thinner.rest()) == (0, [], [])


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.5, 10.0])
@pytest.mark.parametrize("logged_per_s", [0.2, 3.0, 97.0])
def test_a_tag_keeps_its_average_rate_limit(rate: float, logged_per_s: float) -> None:
    thinner, seconds, left = Thinner(rate), 200, []
    steps = int(seconds * logged_per_s)
    for step in range(steps):
        now = step / logged_per_s
        left += thinner.due(now)
        left += thinner.offer(scalars(step, loss=math.sin(step), acc=float(step)), now)
    left += thinner.rest()
    assert 2 * steps == count(left) + thinner.thinned
    for tag in ("loss", "acc"):
        # The last window is not over.
        assert len(points(left, tag)) <= min(rate * seconds + 3, steps)
        # Neither is it less than needed.
        assert len(points(left, tag)) >= min(rate * seconds / 4, steps)


@pytest.mark.parametrize("seed", range(5))
def test_each_window_keeps_its_minimum_maximum_and_last_point(seed: int) -> None:
    thinner, left = Thinner(3.0), []
    log = list(enumerate(walk(1000, seed)))
    for step, value in log:
        # Windows of a second are over with the point that comes a second after their first: the sixth.
        left += points(thinner.offer(scalars(step, loss=value), now=step * 0.2))
    left += points(thinner.rest())
    windows = [log[first : first + 6] for first in range(0, len(log), 6)]
    assert left == [point for window in windows for point in three_of([*window])]
    assert thinner.thinned == len(log) - len(left)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("coarseness", "window"), [(1, 6), (2, 12), (3, 24)])
def test_each_coarseness_level_doubles_the_window(seed: int, coarseness: int, window: int) -> None:
    thinner, left = Thinner(), []
    thinner.coarseness = coarseness
    log = list(enumerate(walk(10 * window, seed)))
    for step, value in log:
        left += points(thinner.offer(scalars(step, loss=value), now=0.0))
    assert thinner.idle
    assert left == [point for first in range(0, len(log), window) for point in three_of([*log[first : first + window]])]
    assert len(left) <= len(log) * 3 // window


def test_kept_points_keep_their_call_time() -> None:
    thinner = Thinner()
    thinner.coarseness = 1
    left = [one for step in range(6) for one in thinner.offer(scalars(step, loss=float(step)), now=0.0)]
    assert left == [scalars(0, loss=0.0), scalars(5, loss=5.0)]


def test_points_of_one_call_stay_together() -> None:
    thinner = Thinner()
    thinner.coarseness = 1
    left = [one for step in range(6) for one in thinner.offer(scalars(step, up=step, down=-step), now=0.0)]
    assert left == [scalars(0, up=0, down=0), scalars(5, up=5, down=-5)]


def test_kept_points_stay_in_order_of_arrival() -> None:
    thinner, chance = Thinner(5.0), random.Random(0)
    for step in range(300):
        tags = chance.sample("abcdef", 3)
        left = thinner.offer(scalars(step, **{tag: chance.random() for tag in tags}), now=step / 50)
        assert [one.step for one in left] == sorted(one.step or 0 for one in left)
    rest = thinner.rest()
    assert [one.step for one in rest] == sorted(one.step or 0 for one in rest)


@pytest.mark.parametrize("seed", range(5))
def test_every_point_is_kept_once_or_counted(seed: int) -> None:
    thinner, chance, given, left = Thinner(7.0), random.Random(seed), 0, []
    for step in range(500):
        thinner.coarseness = chance.choice([0, 0, 1, 2])
        values = {tag: chance.choice([NAN, chance.random()]) for tag in chance.sample("abcdef", chance.randint(1, 6))}
        given += len(values)
        left += thinner.offer(scalars(step, **values), now=step / 30)
        left += thinner.due(step / 30)
    left += thinner.rest()
    seen = [(one.step, tag) for one in left for tag in one.values]
    assert len(seen) == len(set(seen))
    assert count(left) + thinner.thinned == given
    assert thinner.thinned > 0


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([1.0, NAN, 3.0, 2.0, 0.0, 2.0], [1, 2, 5]),
        ([NAN, 1.0, 3.0, 2.0, 0.0, 2.0], [0, 2, 5]),
        ([NAN, NAN, NAN, NAN, NAN, NAN], [5]),
        ([NAN, NAN, NAN, NAN, NAN, 1.0], [4, 5]),
        ([float("inf"), float("-inf"), 0.0, 0.0, 0.0, 0.0], [0, 1, 5]),
        ([10**400, -(10**400), 0, 0, 0, 0], [0, 1, 5]),
    ],
)
def test_a_nan_is_kept(values: list[float], steps: list[int]) -> None:
    thinner = Thinner()
    thinner.coarseness = 1
    left = [one for step, value in enumerate(values) for one in thinner.offer(scalars(step, loss=value), now=0.0)]
    assert [one.step for one in left] == steps


def test_points_wait_no_longer_than_their_window() -> None:
    thinner = Thinner(1.0)
    assert thinner.offer(scalars(0, loss=1.0), now=10.0) == []
    assert not thinner.idle
    assert thinner.due(12.9) == []
    assert thinner.due(13.0) == [scalars(0, loss=1.0)]
    assert thinner.idle


def test_a_count_based_window_also_expires() -> None:
    thinner = Thinner()
    thinner.coarseness = 2
    assert thinner.offer(scalars(0, loss=1.0), now=0.0) == []
    assert thinner.due(1.9) == []
    assert thinner.due(2.0) == [scalars(0, loss=1.0)]


def test_reducing_coarseness_keeps_the_order_of_a_tag() -> None:
    thinner = Thinner()
    thinner.coarseness = 1
    left = thinner.offer(scalars(0, loss=5.0), now=0.0)
    thinner.coarseness = 0
    for step in (1, 2, 3):
        left += thinner.offer(scalars(step, loss=float(step)), now=0.0)
    assert points(left) == [(0, 5.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_steps_may_be_missing() -> None:
    thinner = Thinner()
    thinner.coarseness = 1
    for value in range(6):
        left = thinner.offer(LoggedScalars(step=None, values={"loss": float(value)}, created=0.0), now=0.0)
    assert points(left) == [(None, 0.0), (None, 5.0)]
