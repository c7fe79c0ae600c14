"""Of too many calls whole runs are left out: the same ones on every rank, and each is counted."""

from itertools import pairwise

import pytest
from timing_builders import MS, call, known, window, world

from lightning_ncclsafe.timing.windows import GroupMembers, OpTotal, Window, joined, limited

GROUPS = (world(4), GroupMembers(name="7", ranks=(1, 3)))


def made(count: int, *, rank: int = 0, first: int = 0, group: int = 0) -> Window:
    """Calls of one rank in one group."""
    rows = [call(rank, seq, seq * MS, group=group) for seq in range(first, first + count)]
    totals = {rank: (OpTotal(group=GROUPS[group].name, op="all_reduce", count=count),)}
    return window(rows, groups=GROUPS, clocks=known([rank]), totals=totals)


def seqs(of: Window, rank: int = 0, group: int = 0) -> list[int]:
    found: list[int] = of.calls["seq"][(of.calls["rank"] == rank) & (of.calls["group"] == group)].tolist()
    return found


def test_excess_calls_are_dropped_in_the_same_runs_on_every_rank() -> None:
    kept = []
    for rank, first in ((0, 0), (1, 30)):
        thinned = limited(made(4000, rank=rank, first=first), 1000)
        assert 900 <= len(thinned.calls) <= 1064
        assert thinned.left_out == {rank: 4000 - len(thinned.calls)}
        assert thinned.totals[rank][0].count == 4000, "all are counted"
        kept.append({seq for seq in seqs(thinned, rank) if 30 <= seq < 4000})
    assert kept[0] == kept[1]
    runs = sorted({seq // 64 for seq in kept[0]})
    assert all(second - first == 4 for first, second in pairwise(runs))
    assert {run * 64 + k for run in runs[1:-1] for k in range(64)} <= kept[0], "a run is kept whole"


def test_only_a_rank_and_group_with_too_many_calls_are_thinned() -> None:
    of_all = joined([made(2000), made(100, group=1), made(100, rank=1), made(100, rank=1, group=1)])
    thinned = limited(of_all, 500)
    assert [len(seqs(thinned, rank, group)) for rank in (0, 1) for group in (0, 1)] == [
        pytest.approx(500, abs=64),
        100,
        100,
        100,
    ]
    assert thinned.left_out.keys() == {0}


def test_a_few_distant_calls_are_all_kept() -> None:
    rows = [call(1, 1000 * number, number) for number in range(50)]
    thinned = limited(joined([made(2000), window(rows, groups=GROUPS, clocks=known([1]))]), 500)
    assert len(seqs(thinned, 1)) == 50


def test_calls_up_to_the_limit_are_all_kept() -> None:
    whole = made(1000)
    assert limited(whole, 1000) is whole
    two = limited(joined([made(1000), made(1000, rank=1)]), 1000)
    assert len(two.calls) == 2000 and two.left_out == {}


def test_earlier_omissions_are_added() -> None:
    first = limited(made(4000), 1000)
    again = limited(joined([first, made(4000, first=4000)]), 1000)
    assert again.left_out == {0: 8000 - len(again.calls)}


def test_repeated_limiting_stays_bounded() -> None:
    """Each round samples from all calls so far, not only from what the previous round kept."""
    held, turns = made(0), 40
    for turn in range(turns):
        held = limited(joined([held, *(made(100, first=100 * (turn * 10 + part)) for part in range(10))]), 500)
        assert len(held.calls) <= 564
    assert held.left_out == {0: turns * 1000 - len(held.calls)}
    assert max(seqs(held)) - min(seqs(held)) > turns * 800, "from the whole time"


@pytest.mark.parametrize(("ranks", "most"), [(1, 400), (3, 1200)])
def test_the_last_phases_are_kept_even_with_few_calls(ranks: int, most: int) -> None:
    spans = [(number % ranks, number % 3, number * MS) for number in range(5000)]
    thinned = limited(window([call(0, 1, 1)], groups=GROUPS, clocks=known(range(ranks)), spans=spans), 100)
    assert thinned.spans.tolist() == spans[-most:]
    assert len(thinned.calls) == 1 and thinned.left_out == {}
