"""All ranks' windows come to rank 0, whatever the number of ranks and whoever is held up; over memory."""

import pickle
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from effort import calls_in

from lightning_ncclsafe.collectives import tree as tree_module
from lightning_ncclsafe.collectives.tree import TimingReport, Tree
from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, SharedMemory
from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.timing.windows import (
    CALL,
    OWN,
    SPAN,
    Clock,
    GroupMembers,
    OpTotal,
    Window,
    empty_window,
    encode,
    joined,
)


def own(rank: int, turn: int, *, world_size: int = 2, calls: int = 1, last: bool = False) -> Window:
    """A rank's window of one turn: its calls are numbered by the turn."""
    rows = np.zeros(calls, dtype=CALL)
    rows["rank"], rows["seq"] = rank, turn * calls + np.arange(calls)
    rows["created_ns"] = rows["seq"]
    return Window(
        calls=rows,
        spans=np.zeros(0, SPAN),
        groups=(GroupMembers(name="0", ranks=tuple(range(world_size))),),
        ops=("all_reduce",),
        clocks={rank: Clock()},
        totals={rank: (OpTotal(group="0", op="all_reduce", count=calls),)},
        lost={},
        left_out={},
        last=frozenset([rank] if last else []),
    )


class Ranks:
    """All ranks of a job, who take their turns in one thread."""

    def __init__(self, world_size: int, fan: int = 32) -> None:
        self.shared = SharedMemory()
        self.exchanges = [MemoryExchange(self.shared) for _ in range(world_size)]
        self.trees = [
            Tree(exchange, rank=rank, world_size=world_size, fan=fan) for rank, exchange in enumerate(self.exchanges)
        ]
        self.got: list[tuple[int, int]] = []

    def turn(self, number: int, ranks: Iterable[int] | None = None, *, last: bool = False) -> None:
        for rank in range(len(self.trees)) if ranks is None else ranks:
            self.take(self.trees[rank].pass_on(own(rank, number, world_size=len(self.trees), last=last)))

    def relay(self, ranks: Iterable[int] | None = None) -> None:
        for rank in range(len(self.trees)) if ranks is None else ranks:
            self.take(self.trees[rank].relay())

    def take(self, found: Window | None) -> None:
        if found is not None:
            self.got += [(int(row["rank"]), int(row["seq"])) for row in found.calls]

    def waiting(self) -> list[str]:
        """Keys that have a value."""
        return [key for key, value in self.shared.values.items() if value]


@pytest.fixture
def quick_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that are written and read in a tenth of the time, for tests with thousands: others have the real ones."""
    monkeypatch.setattr(tree_module, "encode", pickle.dumps)
    monkeypatch.setattr(tree_module, "decode", pickle.loads)


@pytest.mark.usefixtures("quick_codec")
@pytest.mark.parametrize(("world_size", "fan"), [(1, 32), (2, 32), (33, 32), (70, 32), (41, 8), (17, 4), (5, 2)])
def test_every_window_arrives_once_and_no_key_remains(world_size: int, fan: int) -> None:
    ranks = Ranks(world_size, fan)
    for number in range(6):
        ranks.turn(number)
    for _ in range(2):
        ranks.relay()
    assert sorted(ranks.got) == [(rank, number) for rank in range(world_size) for number in range(6)]
    assert ranks.waiting() == []
    assert len(ranks.shared.values) <= 4 * world_size, "four keys a rank at most"
    assert all(tree.overwritten == 0 for tree in ranks.trees)


@pytest.mark.usefixtures("quick_codec")
def test_no_rank_reads_from_more_than_62_others() -> None:
    asked: dict[int, int] = {}

    class Counting(MemoryExchange):
        def __init__(self, shared: SharedMemory, rank: int) -> None:
            super().__init__(shared)
            self.rank = rank

        def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
            wanted = list(keys)
            asked[self.rank] = max(asked.get(self.rank, 0), len({key.split("/")[1] for key in wanted}))
            return super().get_many(wanted)

    shared = SharedMemory()
    for rank in range(1024):
        Tree(Counting(shared, rank), rank=rank, world_size=1024).pass_on(own(rank, 0))
    assert asked[0] == 31 + 31 and {asked[rank] for rank in range(32, 1024, 32)} == {31}
    # Who leads nobody looks at a key of its own alone: whether its leader has read it.
    assert all(count == 1 for rank, count in asked.items() if rank % 32) and len(asked) == 1024


@pytest.mark.usefixtures("quick_codec")
def test_the_order_of_turns_does_not_matter() -> None:
    random, ranks = np.random.default_rng(0), Ranks(40, 8)
    for number in range(8):
        ranks.turn(number, random.permutation(40).tolist())
    for _ in range(6):
        ranks.relay()
    assert sorted(ranks.got) == [(rank, number) for rank in range(40) for number in range(8)]


@pytest.mark.parametrize("missed", [1, 2, 3, 4])
def test_a_briefly_delayed_reader_misses_nothing(missed: int) -> None:
    ranks = Ranks(2)
    for number in range(missed):
        ranks.turn(number, [1])
    for _ in range(missed):
        ranks.relay([0])
    assert sorted(ranks.got) == [(1, number) for number in range(missed)]
    assert ranks.trees[0].overwritten == 0 and ranks.waiting() == []


@pytest.mark.usefixtures("quick_codec")
@pytest.mark.parametrize("missed", [5, 6, 9, 13, 63, 64, 65, 300])
def test_a_long_delayed_reader_catches_up_completely(missed: int) -> None:
    ranks = Ranks(2)
    for number in range(missed):
        ranks.turn(number, [1])
        assert len(ranks.waiting()) <= 4 and len(ranks.trees[1]._held) <= 65, "bounded"
    assert ranks.trees[1].holds
    ranks.relay([0, 1, 0])
    assert ranks.got == [(1, number) for number in range(missed)], "in order"
    assert not ranks.trees[1].holds and ranks.waiting() == []
    for number in range(missed, missed + 10):
        ranks.turn(number, [1])
        ranks.relay([0])
        assert ranks.got[-1] == (1, number), "each arrives at once from then on"
    assert ranks.trees[0].overwritten == 0 and len(ranks.got) == missed + 10


def test_held_calls_are_bounded() -> None:
    ranks = Ranks(2)
    ranks.trees[1] = Tree(ranks.exchanges[1], rank=1, world_size=2, most_calls=1000)
    for number in range(400):
        ranks.trees[1].pass_on(own(1, number, calls=500))
        assert sum(len(window.calls) for window in ranks.trees[1]._held) <= 1064 + 64 * 500
    came = [found for rank in (0, 1, 0) if (found := ranks.trees[rank].relay())]
    whole = joined(came)
    (total,) = whole.totals[1]
    assert total.count == 200_000 == len(whole.calls) + whole.left_out[1], "all are counted"


def test_a_large_own_window_is_thinned() -> None:
    tree = Tree(MemoryExchange(), rank=0, world_size=1, most_calls=100)
    found = tree.pass_on(own(0, 0, calls=400))
    assert found is not None and len(found.calls) <= 164
    assert found.left_out == {0: 400 - len(found.calls)}


def test_an_overwritten_window_is_counted() -> None:
    """No rank does this; only another writer to the same store could."""
    ranks, value = Ranks(2), encode(own(1, 6))
    ranks.turn(0, [1])
    ranks.relay([0])
    ranks.exchanges[1].set("timing/1/2", (6).to_bytes(8, "little") + value)
    ranks.relay([0])
    assert ranks.got == [(1, 0), (1, 6)] and ranks.trees[0].overwritten == 5


def test_the_last_window_of_a_fast_writer_arrives() -> None:
    ranks = Ranks(2)
    for number in range(20):
        ranks.turn(number, [1], last=number == 19)
        if number % 6 == 5:
            ranks.relay([0])
    for _ in range(8):
        ranks.relay([0])
    assert (1, 19) in ranks.got and ranks.trees[0].is_done


def test_a_tree_is_done_after_the_last_windows() -> None:
    ranks = Ranks(5, 2)
    ranks.turn(0)
    assert not ranks.trees[0].is_done and not ranks.trees[2].is_done
    assert ranks.trees[1].is_done, "it waits for no rank"
    ranks.turn(1, [1, 3, 4, 2], last=True)
    ranks.relay([2])
    assert ranks.trees[2].is_done
    for _ in range(4):
        ranks.relay([2, 4, 0])
    assert ranks.trees[0].is_done


def test_empty_windows_write_nothing() -> None:
    ranks = Ranks(2)
    ranks.relay([1])
    assert ranks.shared.values == {}


@pytest.mark.parametrize("what", ["calls", "spans", "own", "totals", "lost", "left_out", "last", "missing"])
def test_every_kind_of_content_arrives(what: str) -> None:
    window, whole = empty_window(), own(1, 0, last=True)
    values = {
        "calls": whole.calls,
        "spans": np.zeros(1, SPAN),
        "own": np.zeros(1, OWN),
        "totals": whole.totals,
        "lost": {1: 1},
        "left_out": {1: 1},
        "last": whole.last,
        "missing": ("Rank 1: nothing is timed.",),
    }
    fields = {name: getattr(window, name) for name in Window.__dataclass_fields__}
    fields |= {"groups": whole.groups, "ops": whole.ops, what: values[what]}
    ranks = Ranks(2)
    ranks.trees[1].pass_on(Window(**fields))
    assert len(ranks.waiting()) == 1


def test_stragglers_are_sent_to_all_ranks() -> None:
    ranks = Ranks(3)
    assert ranks.trees[2].newest_report() == TimingReport()
    told = TimingReport(
        stragglers=(Straggler(rank=1, phase="data loading", since_ns=5), Straggler(rank=2, is_over=True))
    )
    ranks.trees[0].send_report(told)
    assert [tree.newest_report() for tree in ranks.trees] == [told] * 3


def test_a_failed_exchange_raises_and_the_next_turn_continues() -> None:
    ranks = Ranks(2)
    ranks.exchanges[1].close()
    with pytest.raises(ExchangeError):
        ranks.turn(0, [1])
    assert ranks.trees[1].holds
    ranks.exchanges[1].lost = ""
    ranks.turn(1, [1])
    ranks.relay([0])
    assert ranks.got == [(1, 0), (1, 1)] and ranks.trees[0].overwritten == 0


class Sometimes(MemoryExchange):
    """Fails at one of its calls, or at all from there on, before or after it has done what it was asked for."""

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__(shared)
        self.calls = 0
        self.fails_at = range(0)
        self.is_done_first = False

    def set(self, key: str, value: bytes) -> None:
        self._fail(before=True)
        super().set(key, value)
        self._fail(before=False)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        self._fail(before=True)
        found = super().get_many(keys)
        self._fail(before=False)
        return found

    def _fail(self, *, before: bool) -> None:
        self.calls += before
        if before is not self.is_done_first and self.calls - 1 in self.fails_at:
            raise ExchangeError("it did not answer in time")


@pytest.mark.usefixtures("quick_codec")
@pytest.mark.parametrize(("times", "is_done_first"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("failing", [0, 2, 3])
def test_everything_arrives_once_despite_any_failed_call(failing: int, times: int, is_done_first: bool) -> None:
    """A call of rank 0, of a leader, or of a member fails, in turns of four ranks."""
    at, is_over = 0, False
    while not is_over:
        ranks = Ranks(4, 2)
        exchange = Sometimes(ranks.shared)
        exchange.fails_at, exchange.is_done_first = range(at, at + times), is_done_first
        ranks.trees[failing] = Tree(exchange, rank=failing, world_size=4, fan=2)
        for number in range(6):
            for rank in (3, 1, 2, 0):
                with suppress(ExchangeError):
                    ranks.turn(number, [rank])
        is_over = exchange.calls <= at
        exchange.fails_at = range(0)
        for _ in range(6):
            ranks.relay([3, 2, 0])
        assert sorted(ranks.got) == [(rank, number) for rank in range(4) for number in range(6)], f"at call {at}"
        assert all(tree.overwritten == tree.unreadable == 0 and not tree.holds for tree in ranks.trees)
        assert ranks.waiting() == []
        at += 1
    assert at > 12


def test_a_possibly_sent_window_is_resent_unchanged() -> None:
    """It is sent without newer windows: a reader that already has it ignores it."""
    ranks = Ranks(2)
    exchange = Sometimes(ranks.shared)
    exchange.fails_at, exchange.is_done_first = range(1, 2), True
    ranks.trees[1] = Tree(exchange, rank=1, world_size=2)
    with pytest.raises(ExchangeError):
        ranks.turn(0, [1])
    assert ranks.trees[1].holds, "it may not have arrived"
    ranks.turn(1, [1])
    ranks.relay([0, 1, 0, 1, 0])
    assert ranks.got == [(1, 0), (1, 1)] and not ranks.trees[1].holds


def test_a_leader_with_a_slow_reader_leaves_member_windows_in_place() -> None:
    ranks = Ranks(4, 2)
    for number in range(4):
        ranks.turn(number, [2])
    ranks.turn(0, [3])
    ranks.relay([2])
    assert "timing/3/0" in ranks.waiting() and not ranks.trees[2].holds
    ranks.relay([0, 2, 0])
    assert sorted(ranks.got) == [(2, 0), (2, 1), (2, 2), (2, 3), (3, 0)]


@pytest.mark.parametrize("value", [b"x", b"nonsense", (0).to_bytes(8, "little") + b"nonsense"])
def test_invalid_windows_are_skipped_and_counted(value: bytes) -> None:
    ranks = Ranks(2)
    ranks.exchanges[1].set("timing/1/3", value)
    ranks.relay([0])
    assert ranks.trees[0].unreadable == 1 and ranks.waiting() == [], "it is not read again and again"
    for number in range(3):
        ranks.turn(number, [1])
        ranks.relay([0])
    assert ranks.got == [(1, 0), (1, 1), (1, 2)], "the number of an invalid window is ignored"
    assert (ranks.trees[0].unreadable, ranks.trees[0].overwritten) == (1, 0)


@pytest.mark.parametrize("stray", [2, -1])
@pytest.mark.parametrize("what", ["calls", "spans", "own", "groups", "clocks", "totals", "lost", "left_out", "last"])
def test_windows_of_foreign_ranks_are_skipped_and_counted(what: str, stray: int) -> None:
    whole, spans = own(1, 0), np.zeros(1, SPAN)
    strange, spans["rank"] = own(stray, 0), stray
    own_work = np.array([(stray, 0, 1)], OWN)
    values = {
        "spans": spans,
        "own": own_work,
        "groups": (GroupMembers(name="0", ranks=(0, 1, stray)),),
        "lost": {stray: 1},
        "left_out": {stray: 1},
        "last": frozenset([stray]),
    }
    ranks = Ranks(2)
    window = replace(whole, **{what: values.get(what, getattr(strange, what))})  # type: ignore[arg-type]
    ranks.trees[1].pass_on(window)
    ranks.relay([0])
    assert (ranks.got, ranks.trees[0].unreadable, ranks.trees[0].ended) == ([], 1, set())
    ranks.turn(1, [1])
    ranks.relay([0])
    assert ranks.got == [(1, 1)]


@pytest.mark.usefixtures("quick_codec")
def test_the_effort_of_rank_0_is_proportional_to_the_ranks() -> None:
    def effort(world_size: int) -> int:
        ranks = Ranks(world_size, 16)
        for rank in [*(rank for rank in range(world_size) if rank % 16), *range(16, world_size, 16)]:
            ranks.turn(0, [rank])
        made = calls_in(lambda: ranks.turn(0, [0]))
        assert len(ranks.got) == world_size
        return made

    assert effort(256) < 4.5 * effort(64)


def test_the_effort_of_rank_0_does_not_depend_on_the_calls() -> None:
    def effort(calls: int) -> int:
        ranks = Ranks(64)
        for rank in [*(rank for rank in range(64) if rank % 32), 32]:
            ranks.trees[rank].pass_on(own(rank, 0, world_size=64, calls=calls))
        return calls_in(lambda: ranks.trees[0].pass_on(own(0, 0, world_size=64, calls=calls)))

    assert effort(390) < 1.1 * effort(10)
