"""How fast a process grows: which of the looks at it are compared."""

import pytest

from lightning_ncclsafe.probes.process.growth import MemoryGrowth

MB = 1_000_000


class Looks:
    """A process that is looked at, at times that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.growth = MemoryGrowth(clock=lambda: self.now_s)

    def at(self, now_s: float, rss_mb: float, swap_mb: float | None = 0, pid: int = 7) -> tuple[int | None, int | None]:
        self.now_s = 100 + now_s
        return self.growth.measure(pid, round(rss_mb * MB), None if swap_mb is None else round(swap_mb * MB))


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_one_look_tells_no_growth(looks: Looks) -> None:
    assert looks.at(0, 100) == (None, None)


def test_two_looks_tell_it(looks: Looks) -> None:
    looks.at(0, 100, 5)
    assert looks.at(2, 520, 125) == (210 * MB, 60 * MB)


def test_what_shrinks_grows_by_less_than_nothing(looks: Looks) -> None:
    looks.at(0, 100)
    assert looks.at(2, 80) == (-10 * MB, 0)


def test_looks_that_follow_at_once_tell_nothing_and_push_nothing_out(looks: Looks) -> None:
    looks.at(0, 100)
    for tick in range(1, 40):
        assert looks.at(tick / 100, 100 + tick) == (None, None)
    assert looks.at(0.5, 200) == (200 * MB, 0)


def test_the_last_look_that_is_long_enough_ago_is_compared(looks: Looks) -> None:
    looks.at(0, 0)
    looks.at(4, 400)
    looks.at(6, 412)
    # 1 s is short, 3 s are enough, and what it did before is past.
    assert looks.at(7, 415) == (5 * MB, 0)


def test_a_look_of_long_ago_tells_nothing(looks: Looks) -> None:
    looks.at(0, 100)
    assert looks.at(61, 900) == (None, None)


def test_swap_that_is_not_known_leaves_memory_known(looks: Looks) -> None:
    looks.at(0, 100, None)
    assert looks.at(2, 120, 8) == (10 * MB, None)


def test_memory_that_is_not_known_is_no_look(looks: Looks) -> None:
    assert looks.growth.measure(7, None, None) == (None, None)
    assert looks.at(2, 120) == (None, None)


def test_processes_are_told_apart_and_not_remembered_for_ever(looks: Looks) -> None:
    looks.at(0, 100, pid=1)
    assert looks.at(2, 100, pid=2) == (None, None)
    for pid in range(1000, 1256):
        looks.at(2, 1, pid=pid)
    assert looks.at(3, 500, pid=1) == (None, None)
    assert looks.at(3, 2, pid=1255) == (1 * MB, 0)
