"""What is kept of a run is bounded however long it lasts."""

import numpy as np
import pytest
from timing_builders import BEGAN_NS, MS, S, matched

from lightning_ncclsafe.timing import history
from lightning_ncclsafe.timing.history import LatenessHistory, RecentCalls, RecentSpans, WorstMoments
from lightning_ncclsafe.timing.lateness import lateness
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.windows import GAP, SPAN


def add_late(history: LatenessHistory, at_s: float, late_ms: float = 10.0) -> None:
    calls = matched([[at_s * 1000 - late_ms], [at_s * 1000]])
    history.add(calls, lateness(calls, {}))


def test_lateness_counts_at_the_arrival_of_the_last_rank() -> None:
    history = LatenessHistory(2)
    for at_s in (0.5, 1.0, 1.2, 3.6):
        add_late(history, at_s)
    assert history.began_ns == BEGAN_NS + S // 2
    assert history.late_s.shape == (2, 4)
    assert history.late_s[0].tolist() == [0, 0, 0, 0]
    assert history.late_s[1].tolist() == pytest.approx([0.03, 0, 0, 0.01])


def test_bins_widen_for_a_long_run_without_loss() -> None:
    history = LatenessHistory(2)
    for at_s in range(0, 3000):
        add_late(history, at_s)
    assert history.late_s.shape[1] <= 512
    assert history.bin_ns == 8 * S
    assert history.late_s[1].sum() == pytest.approx(30.0, rel=1e-3)
    assert history.late_s[1, :-1].tolist() == pytest.approx([0.08] * (history.late_s.shape[1] - 1), rel=1e-3)


def test_a_gap_of_days_takes_few_widenings() -> None:
    history = LatenessHistory(2)
    add_late(history, 1)
    add_late(history, 10 * 86_400)
    assert history.late_s.shape[1] <= 512
    assert history.late_s[1, 0] == pytest.approx(0.01) and history.late_s[1, -1] == pytest.approx(0.01)


def test_earlier_arrivals_count_in_the_first_bin() -> None:
    history = LatenessHistory(2)
    add_late(history, 5)
    add_late(history, 2)
    assert history.late_s[1].tolist() == pytest.approx([0.02])


def test_collectives_in_one_bin_are_added_up() -> None:
    calls = matched([[0, 10, 20, 2000], [0, 10, 20, 2000], [7, 10, 25, 2001]])
    history = LatenessHistory(3)
    history.add(calls, lateness(calls, {}))
    assert history.late_s.shape == (3, 2)
    assert history.late_s[2].tolist() == pytest.approx([0.012, 0.001], rel=1e-3)


def test_without_collectives_the_history_is_empty() -> None:
    assert LatenessHistory(4).late_s.shape == (4, 0)


def nothing_worse() -> WorstMoments:
    return WorstMoments(0, least_ns=0)


def spans(rank: int, first: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.array([(rank, number % 3, number) for number in range(first, first + count)], dtype=SPAN)


def test_spans_of_each_rank_stay_in_order() -> None:
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


def test_no_spans_are_an_empty_array() -> None:
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


def test_an_oversized_single_block_is_kept() -> None:
    recent = RecentCalls(limit_bytes=1)
    for _ in range(3):
        recent.add(matched(np.zeros((2, 50))))
    assert len(recent.blocks) == 1


class Run:
    """One collective of two ranks each second; at each full second a phase begins, a quarter later another."""

    def __init__(self, *, worst_bytes: int = 1 << 20) -> None:
        self.calls, self.spans = RecentCalls(limit_bytes=1 << 20), RecentSpans(1_000_000)
        self.worst = WorstMoments(worst_bytes, least_ns=5 * MS)

    def second(self, number: int, late_ms: float = 0.0) -> None:
        """The collective comes at half past; rank 1 is late."""
        at_ms = 1000.0 * number
        begins_ns = [BEGAN_NS + int(at_ms + ms) * MS for ms in (0, 250)]
        self.spans.add(np.array([(r, p, ns) for r in range(2) for p, ns in enumerate(begins_ns, 1)], dtype=SPAN))
        for block in self.calls.add(
            matched([[at_ms + 500], [at_ms + 500 + late_ms]], before_ns=[at_ms - 500] * 2, follows=[True])
        ):
            self.worst.add(block, self.spans.by_rank)
        self.spans.forget(self.calls.began_ns)

    def phases(self, rank: int) -> list[tuple[int, float]]:
        """What would be drawn of a rank: phases, and the seconds at which they begin."""
        found = self.worst.spans_with(self.spans.by_rank)
        return [(int(phase), (int(ns) - BEGAN_NS) / S) for of, phase, ns in found.tolist() if of == rank]


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are kept, and no more than two phases of each rank for longer."""
    monkeypatch.setattr(history, "KEPT_NS", 10 * S)
    monkeypatch.setattr(history, "_LEAST_BYTES", 0)
    monkeypatch.setattr(history, "_LEAST_SPANS_OF_A_RANK", 2)


def seconds(blocks: list[MatchedCalls]) -> list[float]:
    return [(int(block.arrival_ns[0, 0]) - BEGAN_NS) / S for block in blocks]


@pytest.mark.usefixtures("little")
def test_old_collectives_are_forgotten() -> None:
    run = Run()
    for number in range(1, 101):
        run.second(number)
    assert seconds(run.calls.blocks) == [number + 0.5 for number in range(90, 101)]
    assert run.phases(0)[0] == (2, 89.25), "the phases before the first of them are still known"
    assert run.worst.blocks == []


def test_a_minimum_of_long_steps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    for number in range(0, 100_000, 1000):
        run.second(number)
    assert len(run.calls.blocks) == 100 and len(run.phases(1)) == 200
    monkeypatch.setattr(history, "_LEAST_BYTES", 20_000)
    run.second(100_000)
    assert 5 < len(run.calls.blocks) < 20


@pytest.mark.usefixtures("little")
def test_the_worst_forgotten_collectives_keep_their_phases() -> None:
    run = Run()
    for number in range(1, 101):
        run.second(number, late_ms={20: 40.0, 30: 3.0, 50: 60.0, 99: 90.0}.get(number, 0.0))
    assert seconds(run.worst.blocks) == [20.5, 50.5], "the last one is not forgotten yet, and another was not late"
    late = run.worst.blocks[1]
    assert (late.arrival_ns.shape, late.seq.shape, late.follows.tolist()) == ((2, 1), (1,), [True])
    assert late.arrival_ns[1, 0] - late.arrival_ns[0, 0] == 60 * MS
    before = [phase for phase in run.phases(1) if phase[1] < 60]
    # From the collective before it on; from when it was over, nothing is known.
    assert before == [
        (2, 19.5),
        (1, 20.0),
        (2, 20.25),
        (GAP, 20.54),
        (2, 49.5),
        (1, 50.0),
        (2, 50.25),
        (GAP, 50.56),
    ]


@pytest.mark.usefixtures("little")
def test_consecutive_moments_have_no_gap() -> None:
    run = Run()
    for number in range(1, 101):
        run.second(number, late_ms=40.0 if number in (20, 21) else 0.0)
    assert [phase for phase in run.phases(0) if phase[1] < 60] == [
        (2, 19.5),
        (1, 20.0),
        (2, 20.25),
        (2, 20.5),
        (1, 21.0),
        (2, 21.25),
        (GAP, 21.54),
    ]


@pytest.mark.usefixtures("little")
def test_the_number_of_worst_moments_is_limited() -> None:
    run = Run(worst_bytes=40_000)
    for number in range(1, 201):
        run.second(number, late_ms=10.0 + number * 7 % 100)
    late_ms = [float(np.ptp(block.arrival_ns) / MS) for block in run.worst.blocks]
    assert 5 < len(late_ms) < 25
    assert sorted(late_ms) == sorted(10.0 + number * 7 % 100 for number in range(1, 190))[-len(late_ms) :]


def test_nothing_is_kept_without_room() -> None:
    worst = WorstMoments(0, least_ns=0)
    worst.add(matched([[0.0], [50.0]]), {})
    assert worst.blocks == []
