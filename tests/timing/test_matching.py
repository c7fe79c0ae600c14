"""The calls of all members beside each other, in whatever order they are told of."""

import numpy as np
import pytest
from timing_builders import MS, S, call, known, window, world

from lightning_ncclsafe.timing import matching
from lightning_ncclsafe.timing.matching import MatchedCalls, Matcher
from lightning_ncclsafe.timing.windows import UNKNOWN_NS, Clock, GroupMembers, Window


def told(rank: int, seqs: range, *, ranks: int = 2, begins_ns: int = 0, name: str = "0") -> Window:
    """One rank's window: it calls each collective a millisecond after the one before, rank 1 half of one later."""
    rows = [call(rank, seq, begins_ns + seq * MS + rank * MS // 2) for seq in seqs]
    return window(rows, groups=[world(ranks, name=name)], clocks=known([rank]))


def seqs(found: list[MatchedCalls]) -> list[int]:
    return [seq for calls in found for seq in calls.seq.tolist()]


def test_a_collective_of_two_ranks_is_matched_with_its_arrivals() -> None:
    matcher = Matcher()
    assert matcher.add(told(0, range(3))) == []
    (calls,) = matcher.add(told(1, range(3)))
    assert calls.seq.tolist() == [0, 1, 2]
    assert calls.arrival_ns.tolist() == [[0, MS, 2 * MS], [MS // 2, MS + MS // 2, 2 * MS + MS // 2]]
    assert calls.follows.tolist() == [True, True, True] or calls.follows.tolist() == [False, True, True]
    assert (calls.ops, calls.op.tolist(), matcher.unmatched) == (("all_reduce",), [0, 0, 0], 0)


def test_windows_of_any_rank_may_arrive_in_any_order() -> None:
    random = np.random.default_rng(0)
    windows = [told(rank, range(first, first + 5), ranks=4) for rank in range(4) for first in range(0, 100, 5)]
    matcher, found = Matcher(), []
    for number in random.permutation(len(windows)):
        found += matcher.add(windows[number])
    assert sorted(seqs(found)) == [*range(100)], "each is returned once"
    for calls in found:
        assert calls.arrival_ns.tolist() == [[seq * MS + rank * MS // 2 for seq in calls.seq] for rank in range(4)]
    assert matcher.unmatched == 0


def test_a_collective_is_matched_once_after_all_members_report() -> None:
    matcher = Matcher()
    assert seqs(matcher.add(told(0, range(10)))) == []
    assert seqs(matcher.add(told(1, range(4)))) == [0, 1, 2, 3]
    assert seqs(matcher.add(told(1, range(4, 8)))) == [4, 5, 6, 7]
    assert seqs(matcher.add(window())) == []


def test_a_block_knows_the_arrivals_before_it() -> None:
    matcher = Matcher()
    (first,) = matcher.add(window_of_both(range(3)))
    (second,) = matcher.add(window_of_both(range(3, 5)))
    assert not first.follows[0] or first.before_ns.tolist() == first.arrival_ns[:, 0].tolist()
    assert second.before_ns.tolist() == first.arrival_ns[:, -1].tolist()
    assert second.follows.tolist() == [True, True]


def window_of_both(numbers: range, *, name: str = "0") -> Window:
    rows = [call(rank, seq, seq * MS + rank * MS // 2) for rank in range(2) for seq in numbers]
    return window(rows, groups=[world(2, name=name)], clocks=known(range(2)))


def test_a_collective_after_a_gap_follows_none() -> None:
    matcher = Matcher()
    matcher.add(window_of_both(range(3)))
    (calls,) = matcher.add(window_of_both(range(5, 7)))
    assert calls.follows.tolist() == [False, True]


def test_the_very_first_collective_follows_none() -> None:
    (calls,) = Matcher().add(window_of_both(range(3)))
    (later,) = Matcher().add(window_of_both(range(7, 9)))
    assert not later.follows[0] and later.follows[1]
    # Sequence numbers begin with 1 on gloo; with 0 the arrivals before it are its own, and nobody has worked since.
    assert not calls.follows[0] or (calls.before_ns == calls.arrival_ns[:, 0]).all()


def test_the_first_of_coalesced_operations_counts() -> None:
    rows = [
        call(0, 1, 10, size_bytes=1),
        call(0, 1, 20, size_bytes=2),
        call(0, 2, 30),
        call(1, 1, 12),
        call(1, 1, 11),
        call(1, 2, 31),
    ]
    (calls,) = Matcher().add(window(rows, groups=[world(2)], clocks=known(range(2))))
    assert calls.arrival_ns.tolist() == [[10, 30], [11, 31]]


def test_a_call_reported_twice_is_matched_once() -> None:
    matcher = Matcher()
    matcher.add(told(0, range(3)))
    matcher.add(told(0, range(3)))
    assert seqs(matcher.add(told(1, range(3)))) == [0, 1, 2]


def test_clock_offsets_are_subtracted() -> None:
    rows = [call(0, 1, 100), call(1, 1, 1_000_100)]
    clocks = {0: Clock(offset_ns=0, uncertainty_ns=0), 1: Clock(offset_ns=1_000_000, uncertainty_ns=5)}
    (calls,) = Matcher().add(window(rows, groups=[world(2)], clocks=clocks))
    assert calls.arrival_ns.tolist() == [[100], [100]]
    assert calls.uncertainty_ns.tolist() == [0, 5]


def test_an_unreported_clock_is_unknown() -> None:
    (calls,) = Matcher().add(window([call(0, 1, 1), call(1, 1, 1)], groups=[world(2)], clocks=known([0])))
    assert calls.uncertainty_ns.tolist() == [0, -1]


def test_the_latest_clock_counts() -> None:
    matcher = Matcher()
    matcher.add(window([call(0, 1, 100)], groups=[world(2)], clocks=known([0])))
    clocks = {1: Clock(offset_ns=7, uncertainty_ns=1)}
    (calls,) = matcher.add(window([call(1, 1, 107)], groups=[world(2)], clocks=clocks))
    assert calls.arrival_ns.tolist() == [[100], [100]]


def test_subgroups_are_matched_among_their_members() -> None:
    left = GroupMembers(name="left", ranks=(0, 2))
    right = GroupMembers(name="right", ranks=(1, 3))
    rows = [call(rank, 1, 10 + rank, group=rank % 2) for rank in range(4)] + [
        call(rank, 1, 50, group=2) for rank in (0, 1)
    ]
    found = Matcher().add(window(rows, groups=[left, right, world(4)], clocks=known(range(4))))
    by_name = {calls.group.name: calls.arrival_ns.tolist() for calls in found}
    assert by_name == {"left": [[10], [12]], "right": [[11], [13]]}, "two ranks of the whole group are missing"


def test_non_members_are_ignored() -> None:
    rows = [call(rank, 1, 10 + rank) for rank in range(3)]
    (calls,) = Matcher().add(window(rows, groups=[world(2)], clocks=known(range(3))))
    assert calls.arrival_ns.tolist() == [[10], [11]]


def test_a_group_of_one_rank_never_waits() -> None:
    assert Matcher().add(window([call(0, 1, 1)], groups=[world(1)])) == []


def test_operations_are_matched_by_name() -> None:
    first = window([call(0, 1, 1, op=1), call(0, 2, 2, op=0)], groups=[world(2)], ops=["reduce", "broadcast"])
    second = window([call(1, 1, 1, op=0), call(1, 2, 2, op=1)], groups=[world(2)], ops=["broadcast", "reduce"])
    matcher = Matcher()
    matcher.add(first)
    (calls,) = matcher.add(second)
    assert [calls.ops[number] for number in calls.op] == ["broadcast", "reduce"]


def test_members_may_become_known_later() -> None:
    """Only some ranks learn the members of a group that is destroyed at once."""
    matcher = Matcher()
    unknown = GroupMembers(name="x")
    assert matcher.add(window([call(0, 1, 1)], groups=[unknown], clocks=known([0]))) == []
    is_known = GroupMembers(name="x", ranks=(0, 1))
    (calls,) = matcher.add(window([call(1, 1, 2)], groups=[is_known], clocks=known([1])))
    assert calls.arrival_ns.tolist() == [[1], [2]]
    (calls,) = matcher.add(window([call(0, 2, 3), call(1, 2, 4)], groups=[unknown], clocks=known([0])))
    assert calls.group == is_known


def test_a_recreated_group_starts_over() -> None:
    matcher = Matcher()
    matcher.add(window_of_both(range(1, 4), name="1"))
    (calls,) = matcher.add(window_of_both(range(1, 3), name="2"))
    assert (calls.group.name, calls.seq.tolist(), calls.follows[0]) == ("2", [1, 2], False)


def test_calls_a_member_never_reports_are_given_up_and_counted() -> None:
    matcher = Matcher()
    for second in range(0, 200, 2):
        matcher.add(told(0, range(second * 10, second * 10 + 20), begins_ns=second * S))
    assert matcher.unmatched == pytest.approx(2_000 - 60 / 2 * 20, abs=40), "calls of the last 60 s may still arrive"


def test_pending_calls_are_bounded_and_the_oldest_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_MOST_PENDING", 90)
    matcher = Matcher()
    for rank in range(3):
        matcher.add(told(rank, range(100), ranks=4))
    assert matcher.unmatched == 210
    assert seqs(matcher.add(told(3, range(100), ranks=4))) == [*range(70, 100)]


def test_a_clock_an_hour_behind_loses_no_calls() -> None:
    matcher, found = Matcher(), []
    for second in range(0, 100, 10):
        numbers = range(second * 10, second * 10 + 20)
        matcher.add(told(1, numbers, begins_ns=(second + 3600) * S))
        found += matcher.add(told(0, numbers[:10], begins_ns=second * S))
        found += matcher.add(told(0, numbers[10:], begins_ns=second * S))
    assert len({*seqs(found)}) == 200 and matcher.unmatched == 0


def test_durations_stay_with_their_calls() -> None:
    rows = [call(0, 1, 1, duration_ns=10), call(1, 1, 1, duration_ns=20), call(0, 2, 2, duration_ns=5), call(1, 2, 2)]
    (calls,) = Matcher().add(window(rows, groups=[world(2)], clocks=known(range(2))))
    assert calls.duration_ns.tolist() == [[10, 5], [20, UNKNOWN_NS]]
    assert matching.durations_known(calls.duration_ns).tolist() == [True, False]
