"""What a rank spends waiting in one group is not its own work before a collective of another."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from timing_builders import BEGAN_NS, MS, Job, S, call, known, matched, window

from lightning_ncclsafe.timing.analysis import Analysis
from lightning_ncclsafe.timing.history import RecentOwnWork
from lightning_ncclsafe.timing.lateness import Intervals, Waits, lateness
from lightning_ncclsafe.timing.matching import MatchedCalls, Matcher
from lightning_ncclsafe.timing.summary import StepPhase
from lightning_ncclsafe.timing.windows import OWN, GroupMembers

WORLD = GroupMembers(name="0", ranks=(0, 1, 2, 3), backend="gloo")
PAIRS = (GroupMembers(name="1", ranks=(0, 1), backend="gloo"), GroupMembers(name="2", ranks=(2, 3), backend="gloo"))
STEP_MS = 50


def blocks(arrivals_ms: dict[int, list[float]], group: GroupMembers) -> list[MatchedCalls]:
    rows = [
        call(rank, seq, BEGAN_NS + int(at_ms * MS))
        for rank, times in arrivals_ms.items()
        for seq, at_ms in enumerate(times)
    ]
    return Matcher().add(window(rows, groups=[group], clocks=known(arrivals_ms)))


def within_ms(waits: Intervals, rank: int, begin_ms: float, end_ms: float) -> float:
    begin_ns, end_ns = (np.array([[BEGAN_NS + int(at_ms * MS)]]) for at_ms in (begin_ms, end_ms))
    return float(waits.within_ns([rank], begin_ns, end_ns)[0, 0]) / MS


def test_a_wait_ends_at_the_latest_with_the_next_call() -> None:
    waits = Waits(blocks({0: [0, 100, 105], 1: [30, 100, 140]}, GroupMembers(name="1", ranks=(0, 1))))
    assert within_ms(waits, 0, 0, 50) == pytest.approx(30)
    assert within_ms(waits, 0, 10, 20) == pytest.approx(10)
    assert within_ms(waits, 0, 0, 200) == pytest.approx(30 + 35)
    assert within_ms(waits, 1, 0, 200) == 0
    assert within_ms(waits, 7, 0, 200) == 0


def test_overlapping_waits_count_once() -> None:
    one = blocks({0: [0], 1: [40]}, GroupMembers(name="1", ranks=(0, 1)))
    other = blocks({0: [10], 2: [60]}, GroupMembers(name="2", ranks=(0, 2)))
    assert within_ms(Waits([*one, *other]), 0, 0, 100) == pytest.approx(60)


def own_work(rank: int, begin_ms: float, end_ms: float) -> tuple[int, int, int]:
    return rank, BEGAN_NS + int(begin_ms * MS), BEGAN_NS + int(end_ms * MS)


def lateness_ms(*own: tuple[int, int, int], follows: bool = True, **more: Any) -> list[float]:
    """Rank 1 comes 20 ms later than rank 0 to a collective that follows another, or does not."""
    recent = RecentOwnWork(100)
    recent.add(np.array(list(own), OWN))
    calls = matched([[30], [50]], before_ns=[0, 0], follows=[follows], **more)
    return [float(ns) / MS for ns in lateness(calls, {}, own=recent.since(BEGAN_NS)).late_ns[:, 0]]


@pytest.mark.parametrize("timed", [{}, {"duration_ns": [[21.0], [1.0]]}], ids=["on the host", "on the device"])
def test_own_work_makes_no_rank_late(timed: dict[str, Any]) -> None:
    assert lateness_ms(**timed) == [0, pytest.approx(20)]
    assert lateness_ms(own_work(1, 10, 30), **timed) == [0, pytest.approx(0)]
    assert lateness_ms(own_work(1, 10, 15), **timed) == [0, pytest.approx(15)], "it is late by the rest"
    assert lateness_ms(own_work(1, 10, 20), own_work(1, 15, 25), **timed) == [0, pytest.approx(5)], "counted once"
    assert lateness_ms(own_work(1, -40, 0), **timed) == [0, pytest.approx(20)], "earlier work does not count"
    assert lateness_ms(own_work(0, 10, 30), **timed) == [0, pytest.approx(20)], "nor does one make another late"


def test_own_work_counts_without_a_previous_collective() -> None:
    assert lateness_ms(own_work(1, 35, 45), follows=False) == [0, pytest.approx(10)]


def test_own_work_is_aligned_to_the_ranks_clock() -> None:
    """Rank 1's clock is an hour ahead, and the rank is kept busy in every step."""
    ahead_ns = 3_600 * S
    for is_ours in (False, True):
        job = Job(2, 300, late={(1, step): (StepPhase.HOOKS, 20) for step in range(300)}, clock_ahead_ns={1: ahead_ns})
        analysis, named = Analysis(2), []
        for told in job.windows():
            arrived = told.calls[told.calls["rank"] == 1]["created_ns"]
            rows = [(1, int(at_ns) - 21 * MS, int(at_ns)) for at_ns in arrived] if is_ours else []
            named += analysis.add(replace(told, own=np.array(rows, OWN)))
        assert [straggler.rank for straggler in named] == ([] if is_ours else [1])


def test_only_the_latest_own_work_is_kept() -> None:
    recent = RecentOwnWork(3)
    for number in range(10):
        recent.add(np.array([own_work(0, 10 * number, 10 * number + 1)], OWN))
    found = recent.since(0)
    assert found is not None
    assert within_ms(found, 0, 0, 1000) == pytest.approx(3)
    assert recent.since(BEGAN_NS + S) is None


@pytest.mark.parametrize("late_rank", [0, 1, 2, 3])
def test_the_original_straggler_is_named_and_not_its_partner(late_rank: int) -> None:
    """In each step the pairs meet first and then all ranks, so the late rank's partner is late for the second."""
    analysis, named, noise = Analysis(4), [], np.random.default_rng(late_rank)
    for first in range(0, 300, 50):
        rows = []
        for step in range(first, first + 50):
            began_ms = step * STEP_MS + noise.exponential(0.2, 4)
            own_ms = began_ms + 20 + np.where(np.arange(4) == late_rank, 20, 0)
            pair_ms = np.repeat([own_ms[:2].max(), own_ms[2:].max()], 2)
            for rank in range(4):
                at_ns = [BEGAN_NS + int(at_ms * MS) for at_ms in (own_ms[rank], pair_ms[rank] + noise.exponential(0.2))]
                rows += [
                    (rank, 1 + rank // 2, 0, step, step, 4, at_ns[0], -1),
                    (rank, 0, 0, step, step, 4, at_ns[1], -1),
                ]
        named += analysis.add(window(rows, groups=[WORLD, *PAIRS], clocks=known(range(4))))
    assert [straggler.rank for straggler in named] == [late_rank]
    assert named[0].mean_s == pytest.approx(0.020, abs=0.003), "a delay in two groups counts once"


def test_ranks_with_unknown_clocks_are_not_compared() -> None:
    analysis = Analysis(2)
    rows = [call(rank, seq, BEGAN_NS + seq * MS) for rank in range(2) for seq in range(10)]
    analysis.add(window(rows, groups=[GroupMembers(name="0", ranks=(0, 1))], clocks=known([0])))
    summary = analysis.summary()
    assert summary.steps == 0 and all(op.compared == 0 for op in summary.ops)
    assert summary.missing == ("10 collectives were not compared: the clocks of their ranks were not known yet.",)
