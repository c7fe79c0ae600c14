"""All ranks' windows come to rank 0, whatever the number of ranks and whoever is held up; over memory."""

import time
from collections.abc import Iterable

import numpy as np
import pytest

from lightning_ncclsafe.collectives.tree import Told, Tree
from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, SharedMemory
from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.timing.windows import (
    CALL,
    SPAN,
    Clock,
    GroupMembers,
    OpTotal,
    Window,
    WindowError,
    empty_window,
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


@pytest.mark.parametrize(("world_size", "fan"), [(1, 32), (2, 32), (33, 32), (100, 32), (100, 4), (17, 4), (5, 2)])
def test_everything_of_every_rank_arrives_once_and_nothing_stays(world_size: int, fan: int) -> None:
    ranks = Ranks(world_size, fan)
    for number in range(6):
        ranks.turn(number)
    for _ in range(2):
        ranks.relay()
    assert sorted(ranks.got) == [(rank, number) for rank in range(world_size) for number in range(6)]
    assert ranks.waiting() == []
    assert len(ranks.shared.values) <= 4 * world_size, "four keys a rank at most"
    assert all(tree.overwritten == 0 for tree in ranks.trees)


def test_nobody_reads_more_than_some_tens() -> None:
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
    assert asked[0] == 31 + 31 and asked[32] == 31
    assert {rank for rank, count in asked.items() if count} == {*range(0, 1024, 32)}


def test_the_order_in_which_ranks_take_their_turns_does_not_matter() -> None:
    random, ranks = np.random.default_rng(0), Ranks(40, 8)
    for number in range(8):
        ranks.turn(number, random.permutation(40).tolist())
    for _ in range(6):
        ranks.relay()
    assert sorted(ranks.got) == [(rank, number) for rank in range(40) for number in range(8)]


@pytest.mark.parametrize("missed", [1, 2, 3, 4])
def test_a_reader_that_is_held_up_for_some_turns_misses_nothing(missed: int) -> None:
    ranks = Ranks(2)
    for number in range(missed):
        ranks.turn(number, [1])
    for _ in range(missed):
        ranks.relay([0])
    assert sorted(ranks.got) == [(1, number) for number in range(missed)]
    assert ranks.trees[0].overwritten == 0 and ranks.waiting() == []


@pytest.mark.parametrize("missed", [5, 6, 7, 8, 9, 13])
def test_of_a_reader_that_is_held_up_for_long_what_is_lost_is_counted_and_it_recovers(missed: int) -> None:
    ranks = Ranks(2)
    for number in range(missed):
        ranks.turn(number, [1])
    for _ in range(8):
        ranks.relay([0])
    lost = missed - len(ranks.got)
    assert ranks.trees[0].overwritten == lost == missed - 4
    assert [number for _, number in ranks.got] == sorted(number for _, number in ranks.got), "in order"
    assert ranks.waiting() == []
    for number in range(missed, missed + 10):
        ranks.turn(number, [1])
        ranks.relay([0])
        assert ranks.got[-1] == (1, number), "each arrives at once again"
    assert ranks.trees[0].overwritten == lost


def test_the_last_window_arrives_from_a_writer_that_is_faster_than_its_reader() -> None:
    ranks = Ranks(2)
    for number in range(20):
        ranks.turn(number, [1], last=number == 19)
        if number % 6 == 5:
            ranks.relay([0])
    for _ in range(8):
        ranks.relay([0])
    assert (1, 19) in ranks.got and ranks.trees[0].is_done


def test_who_has_said_the_last_is_known() -> None:
    ranks = Ranks(5, 2)
    ranks.turn(0)
    assert not ranks.trees[0].is_done and not ranks.trees[2].is_done
    assert ranks.trees[1].is_done, "it waits for nobody"
    ranks.turn(1, [1, 3, 4, 2], last=True)
    ranks.relay([2])
    assert ranks.trees[2].is_done
    for _ in range(4):
        ranks.relay([2, 4, 0])
    assert ranks.trees[0].is_done


def test_nothing_is_written_where_there_is_nothing_to_say() -> None:
    ranks = Ranks(2)
    ranks.relay([1])
    assert ranks.shared.values == {}


@pytest.mark.parametrize("what", ["calls", "spans", "totals", "lost", "left_out", "last", "missing"])
def test_whatever_there_is_to_say_is_said(what: str) -> None:
    window, whole = empty_window(), own(1, 0, last=True)
    values = {
        "calls": whole.calls,
        "spans": np.zeros(1, SPAN),
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


def test_stragglers_are_told_to_all_ranks() -> None:
    ranks = Ranks(3)
    assert ranks.trees[2].told() == Told()
    told = Told(stragglers=(Straggler(rank=1, phase="data loading", since_ns=5), Straggler(rank=2, is_over=True)))
    ranks.trees[0].tell(told)
    assert [tree.told() for tree in ranks.trees] == [told] * 3


def test_an_exchange_that_does_not_answer_is_said_so_and_the_next_turn_goes_on() -> None:
    ranks, window = Ranks(2), own(1, 0)
    ranks.exchanges[1].close()
    with pytest.raises(ExchangeError):
        ranks.trees[1].pass_on(window)
    ranks.exchanges[1].lost = ""
    ranks.trees[1].pass_on(window)
    ranks.turn(1, [1])
    ranks.relay([0]), ranks.relay([0])
    assert ranks.got == [(1, 0), (1, 1)] and ranks.trees[0].overwritten == 0


class Sometimes(MemoryExchange):
    """Fails at the calls that it is told to fail at."""

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__(shared)
        self.fails: set[str] = set()

    def set(self, key: str, value: bytes) -> None:
        if ("empty" if not value else "set") in self.fails:
            raise ExchangeError("it did not answer in time")
        super().set(key, value)


@pytest.mark.parametrize("call", ["set", "empty"])
def test_a_leader_that_cannot_write_has_not_lost_what_it_has_read(call: str) -> None:
    """Its own window is kept by the timer, and given again."""
    ranks = Ranks(4, 2)
    leader = ranks.exchanges[2] = Sometimes(ranks.shared)
    ranks.trees[2] = Tree(leader, rank=2, world_size=4, fan=2)
    ranks.turn(0, [3])
    leader.fails = {call}
    with pytest.raises(ExchangeError):
        ranks.trees[2].pass_on(own(2, 0))
    leader.fails = set()
    ranks.turn(0, [2])
    for _ in range(2):
        ranks.relay([0])
    assert sorted(ranks.got) == [(2, 0), (3, 0)]


def test_what_is_no_window_is_said_to_be_none() -> None:
    ranks = Ranks(2)
    ranks.exchanges[1].set("timing/1/0", (0).to_bytes(8, "little") + b"nonsense")
    with pytest.raises(WindowError):
        ranks.trees[0].relay()
    ranks.turn(0, [1])
    ranks.relay([0])
    assert ranks.waiting() == [] and ranks.got in ([], [(1, 0)]), "it is not read again and again"


def test_rank_0_of_1024_is_done_with_a_turn_in_a_fraction_of_a_second() -> None:
    """Some 390 calls of each rank in a turn, as many as such a job shares at most."""
    ranks = Ranks(1024)
    rows = own(0, 0, calls=390)
    for rank in [*(rank for rank in range(1024) if rank % 32), *range(32, 1024, 32)]:
        rows.calls["rank"] = rank
        ranks.trees[rank].pass_on(rows)
    began = time.thread_time()
    found = ranks.trees[0].pass_on(rows)
    took_s = time.thread_time() - began
    assert found is not None and len(found.calls) == 1024 * 390
    assert took_s < 3.0
