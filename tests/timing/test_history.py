"""What is kept of a run is bounded however long it lasts."""

import numpy as np
import pytest
from timing_builders import BEGAN_NS, MS, S, matched

from lightning_ncclsafe.timing.history import LatenessHistory, RecentCalls, RecentSpans, WorstMoments
from lightning_ncclsafe.timing.lateness import lateness
from lightning_ncclsafe.timing.windows import SPAN


def add_late(history: LatenessHistory, at_s: float, late_ms: float = 10.0) -> None:
    calls = matched([[at_s * 1000 - late_ms], [at_s * 1000]])
    history.add(calls, lateness(calls, {}))


def test_lateness_lies_in_the_second_in_which_the_last_rank_came() -> None:
    history = LatenessHistory(2)
    for at_s in (0.5, 1.0, 1.2, 3.6):
        add_late(history, at_s)
    assert history.began_ns == BEGAN_NS + S // 2
    assert history.late_s.shape == (2, 4)
    assert history.late_s[0].tolist() == [0, 0, 0, 0]
    assert history.late_s[1].tolist() == pytest.approx([0.03, 0, 0, 0.01])


def test_bins_widen_so_that_a_long_run_fits_and_nothing_is_lost() -> None:
    history = LatenessHistory(2)
    for at_s in range(0, 3000):
        add_late(history, at_s)
    assert history.late_s.shape[1] <= 512
    assert history.bin_ns == 8 * S
    assert history.late_s[1].sum() == pytest.approx(30.0, rel=1e-3)
    assert history.late_s[1, :-1].tolist() == pytest.approx([0.08] * (history.late_s.shape[1] - 1), rel=1e-3)


def test_a_gap_of_days_is_a_matter_of_a_few_widenings() -> None:
    history = LatenessHistory(2)
    add_late(history, 1)
    add_late(history, 10 * 86_400)
    assert history.late_s.shape[1] <= 512
    assert history.late_s[1, 0] == pytest.approx(0.01) and history.late_s[1, -1] == pytest.approx(0.01)


def test_what_comes_from_before_the_beginning_is_counted_with_it() -> None:
    history = LatenessHistory(2)
    add_late(history, 5)
    add_late(history, 2)
    assert history.late_s[1].tolist() == pytest.approx([0.02])


def test_several_collectives_and_ranks_of_a_group_in_one_bin_are_added_up() -> None:
    calls = matched([[0, 10, 20, 2000], [0, 10, 20, 2000], [7, 10, 25, 2001]])
    history = LatenessHistory(3)
    history.add(calls, lateness(calls, {}))
    assert history.late_s.shape == (3, 2)
    assert history.late_s[2].tolist() == pytest.approx([0.012, 0.001], rel=1e-3)


def test_without_collectives_there_is_no_history() -> None:
    assert LatenessHistory(4).late_s.shape == (4, 0)


def nothing_worse() -> WorstMoments:
    return WorstMoments(0, least_ns=0)


def spans(rank: int, first: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.array([(rank, number % 3, number) for number in range(first, first + count)], dtype=SPAN)


def test_spans_of_each_rank_stay_in_order_whatever_the_order_of_ranks() -> None:
    recent = RecentSpans(1000)
    recent.add(np.concatenate([spans(2, 0, 3), spans(0, 0, 2), spans(2, 3, 2)]))
    recent.add(np.concatenate([spans(0, 2, 2), spans(1, 0, 1)]))
    assert {rank: found["begin_ns"].tolist() for rank, found in recent.by_rank.items()} == {
        0: [0, 1, 2, 3],
        1: [0],
        2: [0, 1, 2, 3, 4],
    }
    assert nothing_worse().spans_with(recent.by_rank)["rank"].tolist() == [0] * 4 + [1] + [2] * 5


def test_the_last_spans_stay_and_all_ranks_share_the_limit() -> None:
    recent = RecentSpans(200)
    for first in range(0, 1000, 10):
        recent.add(np.concatenate([spans(rank, first, 10) for rank in range(4)]))
    for found in recent.by_rank.values():
        assert found["begin_ns"].tolist() == [*range(950, 1000)]


def test_no_spans_are_none() -> None:
    recent = RecentSpans(10)
    recent.add(np.zeros(0, SPAN))
    assert len(nothing_worse().spans_with(recent.by_rank)) == 0 and recent.by_rank == {}


def test_the_last_collectives_stay() -> None:
    recent = RecentCalls(limit_bytes=10_000)
    for number in range(100):
        recent.add(matched([[number * MS] * 20, [number * MS] * 20]))
    blocks = recent.blocks
    assert 2 <= len(blocks) < 20
    assert blocks[-1].arrival_ns[0, 0] > blocks[0].arrival_ns[0, 0]


def test_one_block_that_is_too_large_is_kept_all_the_same() -> None:
    recent = RecentCalls(limit_bytes=1)
    for _ in range(3):
        recent.add(matched(np.zeros((2, 50))))
    assert len(recent.blocks) == 1
