"""Who was late, and in which phase, in jobs where that is known."""

import numpy as np
import pytest
from timing_builders import BEGAN_NS, MS, NUMBER, Job, matched

from lightning_ncclsafe.timing.history import RecentSpans
from lightning_ncclsafe.timing.lateness import NO_PHASE, Lateness, lateness
from lightning_ncclsafe.timing.matching import MatchedCalls, Matcher
from lightning_ncclsafe.timing.summary import StepPhase

UNKNOWN = -1


def of_job(job: Job, *, last: int | None = None) -> tuple[MatchedCalls, Lateness]:
    """All of a job in one block."""
    told = job.window(0, last)
    spans = RecentSpans(10**6)
    found = told.spans.copy()
    for rank, ahead_ns in job.clock_ahead_ns.items():
        found["begin_ns"][found["rank"] == rank] -= ahead_ns
    spans.add(found)
    (calls,) = Matcher().add(told)
    return calls, lateness(calls, spans.by_rank, least_ns=1 * MS)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("late_rank", [0, 1])
def test_one_late_rank_makes_the_others_wait(ranks: int, late_rank: int) -> None:
    arrival = np.zeros((ranks, 1))
    arrival[late_rank] = 20
    late = lateness(matched(arrival), {})
    others = [rank for rank in range(ranks) if rank != late_rank]
    assert late.late_ns[late_rank, 0] == 20 * MS and not late.late_ns[others].any()
    assert late.wait_ns[late_rank, 0] == 0 and (late.wait_ns[others] == 20 * MS).all()
    assert late.skew_ns.tolist() == [20 * MS] and late.transfer_ns.tolist() == [-1]


def test_lateness_is_relative_to_the_median() -> None:
    """One early rank does not make all others late."""
    late = lateness(matched([[0], [50], [50], [53], [50]]), {})
    assert late.late_ns[:, 0].tolist() == [0, 0, 0, 3 * MS, 0]


def test_no_rank_is_late_if_all_arrive_together() -> None:
    late = lateness(matched([[0, 10], [0, 10]]), {})
    assert not late.late_ns.any() and not late.wait_ns.any() and (late.phase == NO_PHASE).all()


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("buckets", [1, 3, 20])
def test_a_delay_carried_across_buckets_counts_once(ranks: int, buckets: int) -> None:
    job = Job(ranks, 10, buckets=buckets, late={(1, 5): (StepPhase.COMPUTE, 20)})
    calls, late = of_job(job)
    assert late.late_ns[:, calls.step == 5].sum(axis=1)[1] == pytest.approx(20 * MS, rel=0.01)
    assert late.late_ns.sum() == pytest.approx(20 * MS, rel=0.01)


def test_delays_at_each_bucket_add_up() -> None:
    arrival = [[0, 1, 2], [5, 11, 17]]
    late = lateness(matched(arrival, before_ns=[-50, -50]), {})
    assert late.late_ns[1].tolist() == [5 * MS, 5 * MS, 5 * MS]


def test_a_rank_that_waits_is_not_late_for_the_next() -> None:
    """Rank 0 waits 30 ms for rank 1, and both work 10 ms: rank 0 was not slower for having waited."""
    late = lateness(matched([[10, 50], [40, 50]], before_ns=[0, 0]), {})
    assert late.late_ns[0].tolist() == [0, 0]
    assert late.late_ns[1].tolist() == [30 * MS, 0]


@pytest.mark.parametrize("phase", list(StepPhase))
@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("buckets", [1, 4])
def test_lateness_belongs_to_the_phase_that_caused_it(phase: StepPhase, is_timed: bool, buckets: int) -> None:
    """Even if the others wait in that very phase."""
    job = Job(4, 10, late={(2, 6): (phase, 20)}, waits_in=phase, is_timed=is_timed, buckets=buckets)
    calls, late = of_job(job)
    at = np.flatnonzero(calls.step == 6)[0]
    assert late.phase[2, at] == NUMBER[phase]
    assert (late.phase[[0, 1, 3]] == NO_PHASE).all()


@pytest.mark.parametrize("phase", [StepPhase.DATA, StepPhase.OPTIMIZER, StepPhase.COMPUTE])
@pytest.mark.parametrize("waits_in", list(StepPhase))
def test_lateness_of_two_ranks_does_not_depend_on_where_the_other_waits(phase: StepPhase, waits_in: StepPhase) -> None:
    late_ones = {(step % 2, step): (phase, 20.0) for step in range(2, 10)}
    _calls, late = of_job(Job(2, 10, late=late_ones, waits_in=waits_in))
    for rank, step in late_ones:
        assert late.phase[rank, step] == NUMBER[phase]
        assert late.late_ns[rank, step] == pytest.approx(20 * MS, rel=0.01)
        assert late.late_ns[1 - rank, step] == 0


def test_phases_are_matched_across_blocks_and_clocks() -> None:
    job = Job(3, 10, late={(1, 5): (StepPhase.DATA, 20)}, clock_ahead_ns={1: 10**9, 2: -(10**9)}, uncertainty_ns=1)
    matcher, spans = Matcher(), RecentSpans(10**6)
    for first in range(0, 10, 5):
        told = job.window(first, first + 5)
        found = told.spans.copy()
        for rank, ahead_ns in job.clock_ahead_ns.items():
            found["begin_ns"][found["rank"] == rank] -= ahead_ns
        spans.add(found)
        (calls,) = matcher.add(told)
        late = lateness(calls, spans.by_rank)
    assert late.phase[1, 0] == NUMBER[StepPhase.DATA], "the first collective of the second block"
    assert late.late_ns[1, 0] == pytest.approx(20 * MS, rel=0.01)


def test_without_phases_a_late_rank_has_no_phase() -> None:
    late = lateness(matched([[0, 10], [0, 30]]), {})
    assert late.late_ns[1, 1] == 20 * MS and (late.phase == NO_PHASE).all()


def test_small_delays_get_no_phase() -> None:
    job = Job(2, 4, late={(1, 1): (StepPhase.DATA, 4), (1, 2): (StepPhase.DATA, 6)})
    (calls,) = Matcher().add(job.window())
    spans = RecentSpans(1000)
    spans.add(job.window().spans)
    late = lateness(calls, spans.by_rank, least_ns=5 * MS)
    assert late.phase[1].tolist() == [NO_PHASE, NO_PHASE, NUMBER[StepPhase.DATA], NO_PHASE]


# On the device: transfer 3 ms, rank 1 comes 20 ms later than rank 0 and rank 2 1 ms later.
DURATIONS = [[23.0], [3.0], [22.0]]


@pytest.mark.parametrize("uncertainty_ns", [[0, 0, 0], [UNKNOWN] * 3, [0, 10**12, 10**12]])
def test_device_durations_need_no_clocks(uncertainty_ns: list[int]) -> None:
    late = lateness(matched([[0], [-500], [900]], duration_ns=DURATIONS, uncertainty_ns=uncertainty_ns), {})
    assert late.transfer_ns.tolist() == [3 * MS]
    assert late.wait_ns[:, 0].tolist() == [20 * MS, 0, 19 * MS]
    assert late.skew_ns.tolist() == [20 * MS]
    assert late.late_ns[:, 0].tolist() == [0, 19 * MS, 0], "against the median of 22 ms"


def test_the_rank_with_the_shorter_duration_is_late() -> None:
    late = lateness(matched([[0], [0]], duration_ns=[[23.0], [3.0]]), {})
    assert late.late_ns[:, 0].tolist() == [0, 20 * MS]


def test_one_unknown_duration_falls_back_to_clocks() -> None:
    calls = matched([[0], [7]], duration_ns=[[23.0], [3.0]])
    calls.duration_ns[0, 0] = UNKNOWN
    late = lateness(calls, {})
    assert (late.transfer_ns[0], late.late_ns[1, 0], late.skew_ns[0]) == (-1, 7 * MS, 7 * MS)


def test_a_slow_device_with_a_timely_host_computes_slowly() -> None:
    """The host calls everything early; the collective itself starts late and is therefore short."""
    job = Job(4, 6, is_timed=True)
    (calls,) = Matcher().add(job.window())
    calls.duration_ns[:, 3] = [20 * MS, 20 * MS, 1 * MS, 20 * MS]
    spans = RecentSpans(1000)
    spans.add(job.window().spans)
    late = lateness(calls, spans.by_rank)
    assert late.late_ns[2, 3] == 19 * MS
    assert late.phase[2, 3] == NUMBER[StepPhase.COMPUTE]


@pytest.mark.parametrize(("uncertainty_ns", "late_ns"), [(4 * MS, 20 * MS), (11 * MS, 0), (25 * MS, 0), (UNKNOWN, 0)])
def test_lateness_within_clock_uncertainty_is_not_reported(uncertainty_ns: int, late_ns: int) -> None:
    late = lateness(matched([[0], [20], [0]], uncertainty_ns=[uncertainty_ns] * 3), {})
    assert late.late_ns[1, 0] == late_ns


@pytest.mark.parametrize("ahead_ms", [-1000, 1000])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_is_late_if_no_clock_is_known(ranks: int, ahead_ms: float) -> None:
    """Half of the ranks are on a host with an unknown clock."""
    half = ranks // 2
    arrival = np.tile([0.0, 10.0, 20.0], (ranks, 1))
    arrival[half:] += ahead_ms
    late = lateness(matched(arrival, uncertainty_ns=[0] * half + [UNKNOWN] * half), {})
    assert not late.late_ns.any()


def test_a_rank_with_a_known_clock_may_be_late_next_to_one_with_an_unknown_clock() -> None:
    arrival = [[0], [20], [0], [0], [-900]]
    late = lateness(matched(arrival, uncertainty_ns=[0, 0, 0, 0, UNKNOWN]), {})
    assert late.late_ns[:, 0].tolist() == [0, 20 * MS, 0, 0, 0]


def test_epoch_times_are_exact_to_the_nanosecond() -> None:
    calls = matched([[0], [0]])
    calls.arrival_ns[1, 0] = BEGAN_NS + 1
    assert lateness(calls, {}).late_ns[:, 0].tolist() == [0, 1]


def test_phases_are_looked_up_for_a_bounded_number_of_arrivals() -> None:
    """A block of 64 ranks and 2,000 collectives, each with a late rank."""
    random = np.random.default_rng(0)
    job = Job(64, 500, jitter_ms=random.exponential(5, (64, 500)), buckets=4)
    _, late = of_job(job)
    assert 0 < (late.phase != NO_PHASE).sum() <= 256
