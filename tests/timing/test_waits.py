"""What a rank spends waiting in one group is not its own work before a collective of another."""

import numpy as np
import pytest
from timing_builders import BEGAN_NS, MS, call, known, window

from lightning_ncclsafe.timing.analysis import Analysis
from lightning_ncclsafe.timing.matching import MatchedCalls, Matcher
from lightning_ncclsafe.timing.waits import Waits
from lightning_ncclsafe.timing.windows import GroupMembers

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


def within_ms(waits: Waits, rank: int, begin_ms: float, end_ms: float) -> float:
    begin_ns, end_ns = (np.array([[BEGAN_NS + int(at_ms * MS)]]) for at_ms in (begin_ms, end_ms))
    return float(waits.within_ns([rank], begin_ns, end_ns)[0, 0]) / MS


def test_who_comes_first_waits_for_the_last_and_no_longer_than_until_its_next_call() -> None:
    waits = Waits(blocks({0: [0, 100, 105], 1: [30, 100, 140]}, GroupMembers(name="1", ranks=(0, 1))))
    assert within_ms(waits, 0, 0, 50) == pytest.approx(30)
    assert within_ms(waits, 0, 10, 20) == pytest.approx(10)
    assert within_ms(waits, 0, 0, 200) == pytest.approx(30 + 35)
    assert within_ms(waits, 1, 0, 200) == 0
    assert within_ms(waits, 7, 0, 200) == 0


def test_waits_that_overlap_are_counted_once() -> None:
    one = blocks({0: [0], 1: [40]}, GroupMembers(name="1", ranks=(0, 1)))
    other = blocks({0: [10], 2: [60]}, GroupMembers(name="2", ranks=(0, 2)))
    assert within_ms(Waits([*one, *other]), 0, 0, 100) == pytest.approx(60)


@pytest.mark.parametrize("late_rank", [0, 1, 2, 3])
def test_who_makes_others_wait_is_named_and_not_who_hands_it_on(late_rank: int) -> None:
    """In each step first the pairs meet, then all: the late one's partner is late for the second, too."""
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
    assert named[0].mean_s == pytest.approx(0.020, abs=0.003), "a delay that shows in two groups is one"


def test_of_ranks_whose_clocks_are_not_known_yet_nothing_is_said() -> None:
    analysis = Analysis(2)
    rows = [call(rank, seq, BEGAN_NS + seq * MS) for rank in range(2) for seq in range(10)]
    analysis.add(window(rows, groups=[GroupMembers(name="0", ranks=(0, 1))], clocks=known([0])))
    summary = analysis.summary()
    assert summary.steps == 0 and all(op.compared == 0 for op in summary.ops)
    assert summary.missing == ("10 collectives were not compared: the clocks of their ranks were not known yet.",)
