"""All windows of a job together: its numbers against those of a job made by hand, in bounded memory."""

from typing import Any

import numpy as np
import pytest
from timing_builders import BEGAN_NS, MS, Job, S, call, known, window, world

from lightning_ncclsafe.timing.analysis import Analysis
from lightning_ncclsafe.timing.summary import StepPhase
from lightning_ncclsafe.timing.windows import Clock, GroupMembers, OpTotal, encode


def total(op: str = "all_reduce", **more: Any) -> OpTotal:
    return OpTotal(group="0", op=op, **more)


def test_the_summary_of_a_handmade_job_is_exact() -> None:
    """Two ranks, three steps: rank 1 comes 10 ms late, then nobody, then rank 0 by 4 ms; each takes 2 ms."""
    late_ms = [(0, 10), (0, 0), (4, 0)]
    rows = [
        (
            rank,
            0,
            0,
            step,
            step,
            8_000_000,
            BEGAN_NS + step * 100 * MS + late[rank] * MS,
            (max(late) - late[rank] + 2) * MS,
        )
        for step, late in enumerate(late_ms, start=1)
        for rank in range(2)
    ]
    analysis = Analysis(2)
    totals = {rank: (total(count=3, size_bytes=24_000_000), total("send 0->1", count=rank)) for rank in range(2)}
    clocks = {0: Clock(offset_ns=0, uncertainty_ns=0), 1: Clock(offset_ns=0, uncertainty_ns=3)}
    analysis.add(
        window(
            rows,
            groups=[world(2, backend="nccl")],
            clocks=clocks,
            totals=totals,
            lost={0: 1, 1: 2},
            left_out={1: 4},
            missing=("a",),
        )
    )
    analysis.finish()
    found = analysis.summary()
    assert (found.began_ns, found.ended_ns) == (BEGAN_NS + 100 * MS, BEGAN_NS + 304 * MS)
    assert (found.steps, found.lost, found.left_out, found.unmatched) == (3, 3, 4, 0)
    assert (found.missing, found.stragglers) == (("a",), ())
    reduce, send = found.ops
    assert (reduce.op, reduce.group, reduce.backend, reduce.ranks) == ("all_reduce", "0", "nccl", 2)
    assert (reduce.count, reduce.compared, reduce.size_bytes) == (3, 3, 8_000_000)
    assert reduce.skew_s == pytest.approx(0.014 / 3)
    assert reduce.wait_s == pytest.approx(0.007 / 3), "the mean of both ranks, one of which never waits"
    assert reduce.transfer_s == pytest.approx(0.002)
    assert reduce.bus_bandwidth == pytest.approx(4e9), "2 * (n - 1) / n is 1 for two ranks"
    assert (send.op, send.count, send.compared, send.transfer_s, send.bus_bandwidth) == ("send 0->1", 1, 0, None, None)
    first, second = found.ranks
    assert (first.rank, first.steps, first.late_steps, first.clock) == (0, 3, 1, clocks[0])
    assert (first.late_s, first.waited_s) == (pytest.approx(0.004), pytest.approx(0.010))
    assert (second.rank, second.late_steps, second.clock) == (1, 1, clocks[1])
    assert (second.late_s, second.waited_s) == (pytest.approx(0.010), pytest.approx(0.004))


def test_missing_durations_give_no_bandwidth() -> None:
    analysis = Analysis(2)
    for told in Job(2, 20, late={(1, 3): (StepPhase.DATA, 20)}).windows():
        analysis.add(told)
    analysis.finish()
    (op,) = analysis.summary().ops
    assert (op.transfer_s, op.bus_bandwidth) == (None, None)
    assert (op.count, op.compared) == (20, 20)
    assert op.skew_s == pytest.approx(0.020 / 20)


def test_lateness_is_summed_by_phase() -> None:
    late = {(1, 2): (StepPhase.DATA, 20.0), (1, 4): (StepPhase.DATA, 10.0), (2, 6): (StepPhase.OPTIMIZER, 30.0)}
    analysis = Analysis(3)
    for told in Job(3, 10, late=late).windows(every=5):
        analysis.add(told)
    analysis.finish()
    ranks = analysis.summary().ranks
    assert ranks[0].by_phase_s == {}
    assert ranks[1].by_phase_s == {StepPhase.DATA: pytest.approx(0.030, rel=0.01)}
    assert ranks[2].by_phase_s == {StepPhase.OPTIMIZER: pytest.approx(0.030, rel=0.01)}
    assert [rank.late_steps for rank in ranks] == [0, 2, 1]
    assert [rank.waited_s for rank in ranks] == [pytest.approx(value, rel=0.01) for value in (0.060, 0.030, 0.030)]


def test_the_order_of_windows_does_not_matter() -> None:
    random = np.random.default_rng(0)
    late = {(2, int(step)): (StepPhase.DATA, 20.0) for step in random.choice(200, 60, replace=False)}
    job = Job(4, 200, late=late, buckets=2)
    together, apart = Analysis(4), Analysis(4)
    for told in job.windows():
        together.add(told)
    for first in range(0, 200, 50):
        for rank in random.permutation(4):
            apart.add(job.window(first, first + 50, ranks=[int(rank)]))
    together.finish(), apart.finish()
    one, other = together.summary(), apart.summary()
    assert one.ops == other.ops
    assert [rank.late_s for rank in one.ranks] == [rank.late_s for rank in other.ranks]
    assert [straggler.rank for straggler in one.stragglers] == [straggler.rank for straggler in other.stragglers] == [2]


def test_uncompared_calls_are_counted() -> None:
    analysis = Analysis(2)
    for _ in range(3):
        analysis.add(window(totals={0: (total(count=100, size_bytes=400),)}, lost={0: 7}, left_out={0: 90, 1: 10}))
    found = analysis.summary()
    (op,) = found.ops
    assert (op.count, op.compared, op.size_bytes) == (300, 0, 4)
    assert (found.lost, found.left_out) == (21, 300)


def test_the_count_is_per_rank() -> None:
    analysis = Analysis(4)
    analysis.add(window(totals={rank: (total(count=10 + rank, size_bytes=130),) for rank in range(4)}))
    assert analysis.summary().ops[0].count == 13


def test_operations_with_the_longest_waits_are_first() -> None:
    rows = [
        call(rank, seq, seq * 100 * MS + rank * (30 * MS if seq == 3 else 1 * MS), op=int(seq == 3))
        for seq in range(1, 4)
        for rank in range(2)
    ]
    analysis = Analysis(2)
    analysis.add(window(rows, groups=[world(2)], ops=["all_reduce", "broadcast"], clocks=known(range(2))))
    assert [op.op for op in analysis.summary().ops] == ["broadcast", "all_reduce"]


def test_known_members_stay_known() -> None:
    analysis = Analysis(2)
    rows = [call(rank, 1, 100 * MS, duration_ns=MS) for rank in range(2)]
    analysis.add(window(rows, groups=[world(2, name="x")], clocks=known(range(2))))
    analysis.add(window(groups=[GroupMembers(name="x")]))
    assert [op.ranks for op in analysis.summary().ops] == [2]


def test_clock_offsets_are_subtracted_from_spans() -> None:
    job = Job(3, 20, late={(2, 9): (StepPhase.LOGGING, 20)}, clock_ahead_ns={1: 5 * S, 2: -7 * S}, uncertainty_ns=1)
    analysis = Analysis(3)
    for told in job.windows(every=10):
        analysis.add(told)
    analysis.finish()
    assert analysis.summary().ranks[2].by_phase_s == {StepPhase.LOGGING: pytest.approx(0.020, rel=0.01)}
    begins = [spans["begin_ns"][0] for spans in analysis.spans.by_rank.values()]
    assert begins == [BEGAN_NS] * 3


def test_fresh_calls_are_taken_once() -> None:
    analysis, job = Analysis(2), Job(2, 20)
    analysis.add(job.window(0, 10))
    assert len(analysis.take_fresh()) == 1
    assert analysis.take_fresh() == []


def test_untaken_calls_do_not_pile_up() -> None:
    analysis, job = Analysis(2, trace_bytes=20_000), Job(2, 300)
    for told in job.windows(every=1):
        analysis.add(told)
    assert len(analysis.take_fresh()) < 100
    assert sum(len(block.seq) for block in analysis.calls.blocks) < 300


def test_a_step_reported_by_groups_at_different_times_counts_once() -> None:
    """The windows of some ranks pass through a leader and arrive a turn later."""
    left, right = GroupMembers(name="left", ranks=(0, 1)), GroupMembers(name="right", ranks=(2, 3))
    analysis = Analysis(4)
    for begin in range(0, 400, 50):
        for first_rank, group, from_step in ((0, left, begin), (2, right, begin - 50)):
            rows = [
                (rank, 0, 0, step, step, 4, BEGAN_NS + step * 50 * MS, -1)
                for step in range(from_step, from_step + 50)
                for rank in (first_rank, first_rank + 1)
                if step >= 0
            ]
            analysis.add(window(rows, groups=[group], clocks=known([first_rank, first_rank + 1])))
    analysis.finish()
    # Before the second group was heard of nobody could wait for it.
    assert 400 <= analysis.summary().steps < 500


def test_a_large_job_is_compared_completely() -> None:
    """One turn of 64 ranks, whose windows take a few kilobytes each."""
    job = Job(64, 100, buckets=5, jitter_ms=np.random.default_rng(0).exponential(0.3, (64, 100)))
    assert len(encode(job.window(0, 50, ranks=[0]))) < 10_000
    analysis = Analysis(64)
    for told in job.windows():
        analysis.add(told)
    assert analysis.summary().ops[0].compared == 500
