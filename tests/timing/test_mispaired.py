"""Ranks whose collectives of one number differ, and complete all the same: NCCL compares neither op nor size."""

from collections.abc import Sequence

import pytest
from timing_builders import MS, S, call, known, window

from lightning_ncclsafe.timing.matching import Matcher, Mispairing, PairedCall
from lightning_ncclsafe.timing.windows import UNKNOWN_NS, Clock, GroupMembers

OPS = ("all_reduce", "broadcast", "all_gather", "_all_gather_base")


def found_in(calls: Sequence[Sequence[tuple[int, int]]], **more: int) -> Mispairing | None:
    """What is found if these are the calls of each rank, as position in ``OPS`` and bytes."""
    matcher = Matcher()
    for rank, own in enumerate(calls):
        rows = [
            call(rank, seq, seq * MS + rank * more.get("late_ns", 0), op=op, size_bytes=size,
                 duration_ns=more.get(f"duration_{rank}_ns", MS))
            for seq, (op, size) in enumerate(own)
        ]  # fmt: skip
        group = GroupMembers(name="7", description="tensor", ranks=tuple(range(len(calls))), backend="nccl")
        matcher.add(window(rows, groups=[group], ops=OPS, clocks=known([rank])))
    return matcher.mispairing


def test_the_first_call_in_which_ranks_differ_is_named_with_both_sides() -> None:
    same = [(0, 4)] * 11
    found = found_in([[*same, (0, 4), (0, 8)], [*same, (1, 16), (1, 16)], [*same, (0, 4), (0, 8)]])
    assert found == Mispairing(
        group="7",
        description="tensor",
        seq=11,
        step=1,
        calls=(
            PairedCall(op="all_reduce", size_bytes=4, ranks=(0, 2)),
            PairedCall(op="broadcast", size_bytes=16, ranks=(1,)),
        ),
    )


@pytest.mark.parametrize("op", [0, 1, 3])
def test_sizes_differ_where_all_ranks_should_give_as_much(op: int) -> None:
    found = found_in([[(op, 4)], [(op, 8)]])
    assert found is not None
    assert [(one.size_bytes, one.ranks) for one in found.calls] == [(4, (0,)), (8, (1,))]


def test_an_all_gather_of_different_sizes_is_legal() -> None:
    assert found_in([[(2, 4)], [(2, 8)]]) is None


def test_one_operation_may_be_called_by_different_functions() -> None:
    assert found_in([[(2, 4)], [(3, 4)]]) is None
    assert found_in([[(2, 4)], [(3, 4)], [(1, 4)]]) is not None


def test_four_different_calls_are_named_and_the_ranks_of_others_counted() -> None:
    found = found_in([[(0, 4 + rank // 2)] for rank in range(16)])
    assert found is not None
    named = [(one.size_bytes, one.ranks) for one in found.calls]
    assert named == [(4, (0, 1)), (5, (2, 3)), (6, (4, 5)), (7, (6, 7))]
    assert found.other_ranks == 8


def test_equal_calls_are_no_mispairing() -> None:
    assert found_in([[(0, 4), (1, 8)], [(0, 4), (1, 8)]]) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_said_of_a_call_that_has_not_ended_on_a_rank(rank: int) -> None:
    assert found_in([[(0, 4)], [(1, 4)]], **{f"duration_{rank}_ns": UNKNOWN_NS}) is None


def test_calls_of_different_times_belong_to_two_groups_of_one_name() -> None:
    assert found_in([[(0, 4)], [(1, 4)]], late_ns=6 * S) is None
    assert found_in([[(0, 4)], [(1, 4)]], late_ns=4 * S) is not None


def test_a_group_that_is_made_again_under_its_name_may_call_something_else() -> None:
    matcher = Matcher()
    group = GroupMembers(name="0", ranks=(0, 1), backend="nccl")
    for time, ops in enumerate([(0, 0), (0, 1)]):
        rows = [call(rank, 1, time * MS, op=op, duration_ns=MS) for rank, op in enumerate(ops)]
        matcher.add(window(rows, groups=[group], ops=OPS, clocks=known(range(2))))
    assert matcher.mispairing is None
    rows = [call(rank, 2, 3 * MS, op=rank, duration_ns=MS) for rank in range(2)]
    matcher.add(window(rows, groups=[group], ops=OPS, clocks=known(range(2))))
    assert matcher.mispairing is not None


def test_times_are_those_of_one_clock() -> None:
    matcher = Matcher()
    group = GroupMembers(name="0", ranks=(0, 1), backend="nccl")
    for rank in range(2):
        rows = [call(rank, 0, rank * 60 * S, op=rank, duration_ns=MS)]
        clocks = {rank: Clock(offset_ns=rank * 60 * S, uncertainty_ns=0)}
        matcher.add(window(rows, groups=[group], ops=OPS, clocks=clocks))
    assert matcher.mispairing is not None


def test_the_first_mispairing_stays() -> None:
    matcher = Matcher()
    group = GroupMembers(name="0", ranks=(0, 1), backend="nccl")
    for seq in range(2):
        rows = [call(rank, seq, seq * MS, op=rank, duration_ns=MS) for rank in range(2)]
        matcher.add(window(rows, groups=[group], ops=OPS, clocks=known(range(2))))
    assert matcher.mispairing is not None
    assert matcher.mispairing.seq == 0
