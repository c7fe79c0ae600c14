"""How fast a process grows, and what share of the cores it gets: which of the looks at it are compared."""

import os

import pytest

from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.probes.process.growth import LEAST_S, MemoryGrowth, with_core_shares
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread

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


def test_one_sample_gives_no_growth(looks: Looks) -> None:
    assert looks.at(0, 100) == (None, None)


def test_two_samples_give_growth(looks: Looks) -> None:
    looks.at(0, 100, 5)
    assert looks.at(2, 520, 125) == (210 * MB, 60 * MB)


def test_shrinking_is_negative_growth(looks: Looks) -> None:
    looks.at(0, 100)
    assert looks.at(2, 80) == (-10 * MB, 0)


def test_samples_in_quick_succession_are_ignored(looks: Looks) -> None:
    looks.at(0, 100)
    for tick in range(1, 40):
        assert looks.at(tick / 100, 100 + tick) == (None, None)
    assert looks.at(0.5, 200) == (200 * MB, 0)


def test_the_latest_sufficiently_old_sample_is_compared(looks: Looks) -> None:
    looks.at(0, 0)
    looks.at(4, 400)
    looks.at(6, 412)
    # 1 s is short, 3 s are enough, and what it did before is past.
    assert looks.at(7, 415) == (5 * MB, 0)


def test_an_outdated_sample_gives_no_growth(looks: Looks) -> None:
    looks.at(0, 100)
    assert looks.at(61, 900) == (None, None)


def test_unknown_swap_does_not_hide_memory_growth(looks: Looks) -> None:
    looks.at(0, 100, None)
    assert looks.at(2, 120, 8) == (10 * MB, None)


def test_unknown_memory_is_not_a_sample(looks: Looks) -> None:
    assert looks.growth.measure(7, None, None) == (None, None)
    assert looks.at(2, 120) == (None, None)


def test_processes_are_separate_and_eventually_forgotten(looks: Looks) -> None:
    looks.at(0, 100, pid=1)
    assert looks.at(2, 100, pid=2) == (None, None)
    for pid in range(1000, 1256):
        looks.at(2, 1, pid=pid)
    assert looks.at(3, 500, pid=1) == (None, None)
    assert looks.at(3, 2, pid=1255) == (1 * MB, 0)


def test_core_shares_are_the_difference_of_two_samples() -> None:
    now = look_at_main_thread()
    assert now.ran_s is not None and now.queued_s is not None
    before = ThreadLook(ran_s=now.ran_s - 1.0, queued_s=now.queued_s - 3.0)
    facts = with_core_shares(ProcessFacts(pid=os.getpid()), before, now, 10.0)
    assert facts.ran_share == pytest.approx(0.1, abs=0.05)
    assert facts.queued_share == pytest.approx(0.3, abs=0.05)


def test_short_or_unknown_intervals_have_no_share() -> None:
    facts = ProcessFacts(pid=os.getpid())
    now = look_at_main_thread()
    assert with_core_shares(facts, now, now, LEAST_S / 2) == facts
    assert with_core_shares(facts, ThreadLook(), now, 10.0) == facts
