"""The ranks of a host that have not joined: found by their processes, looked at now and then, and missed."""

import os
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
from own_threads import join_own_threads

from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.facts import ProcessFacts, codec
from lightning_ncclsafe.guard import local_ranks as module
from lightning_ncclsafe.guard.local_ranks import LocalRanks
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.probes.rank_info import RankInfo, info_key


class Host:
    """A host on which processes of ranks come and go, and what rank 1 of 3 there sees of it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pids: dict[int, int] = {}
        self.states: dict[int, str] = {}
        self.searches = 0
        self.search_s = 0.0
        self.looks: list[int] = []
        self.known: tuple[RankInfo, ...] = ()
        self.neighbours = self.local_ranks()

    def local_ranks(
        self, *, find: Callable[[str, range], dict[int, int]] | None = None, met: dict[int, RankInfo] | None = None
    ) -> LocalRanks:
        place = Place(rank=4, local_rank=1, world_size=6, local_world_size=3, master_port="29500")
        return LocalRanks(
            place,
            self,  # type: ignore[arg-type]
            host="node",
            find=find or self.find,
            clock=lambda: self.now_s,
            met=met,
        )

    def find(self, master_port: str, ranks_here: range) -> dict[int, int]:
        assert (master_port, ranks_here) == ("29500", range(3, 6))
        self.searches += 1
        self.now_s += self.search_s
        return {ranks_here[local_rank]: pid for local_rank, pid in self.pids.items() if local_rank < len(ranks_here)}

    def look_at(self, peer: RankInfo) -> ProcessFacts:
        self.looks.append(peer.rank)
        return ProcessFacts(pid=peer.pid, rank=peer.rank, state=self.states.get(peer.pid, "running"))

    def tick(self, after_s: float = 2.0, idle_s: float = 30.0) -> bool:
        self.now_s += after_s
        self.neighbours.look_around(idle_s)
        return self.neighbours.has_lost


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """With processes 70, 71, … that exist."""

    def process(pid: int) -> psutil.Process:
        if pid < 70:
            raise psutil.NoSuchProcess(pid)
        return type("Process", (), {"create_time": lambda _: 1000.0 + pid})()  # type: ignore[return-value]

    monkeypatch.setattr("lightning_ncclsafe.guard.local_ranks.psutil.Process", process)
    yield Host()


def test_they_are_found_by_their_environment_and_have_no_guard(host: Host) -> None:
    host.pids = {0: 70, 1: os.getpid(), 2: 72, 3: 99}
    host.neighbours.search()
    assert host.known == (
        RankInfo(rank=3, host="node", pid=70, started=1070.0, has_guard=False),
        RankInfo(rank=5, host="node", pid=72, started=1072.0, has_guard=False),
    )


def test_in_a_later_call_of_the_trainer_they_are_known_before_they_come_to_it(host: Host) -> None:
    peers = {rank: RankInfo(rank=rank, host="node", pid=70 + rank) for rank in (3, 5)}
    host.local_ranks(met=peers)
    assert [(peer.rank, peer.pid, peer.has_guard) for peer in host.known] == [(3, 73, False), (5, 75, False)]
    exchange, met = MemoryExchange(), {3: RankInfo(rank=3, host="node", pid=7)}
    for rank, peer in peers.items():
        exchange.set(info_key(rank), codec.encode(peer))
    host.local_ranks(met=met).meet(exchange)
    assert met == peers and [peer.has_guard for peer in host.known] == [True, True]


def test_one_that_ends_while_it_is_found_is_left_out(host: Host) -> None:
    host.pids = {0: 7, 2: 72}
    host.neighbours.search()
    assert [peer.rank for peer in host.known] == [5]


def test_nobody_is_looked_for_in_the_first_moments(host: Host) -> None:
    host.pids = {0: 70, 2: 72}
    host.tick(idle_s=1.9)
    assert (host.searches, host.looks) == (0, [])
    host.tick(idle_s=2.0)
    assert (host.searches, host.looks) == (1, [3, 5])


def test_they_are_looked_at_every_two_seconds_and_searched_for_until_all_are_there(host: Host) -> None:
    host.pids = {0: 70}
    for _ in range(16):
        host.tick(0.25)
    assert (host.searches, host.looks) == (2, [3, 3])
    host.pids = {0: 70, 2: 72}
    host.tick(2.0)
    host.tick(2.0)
    assert (host.searches, host.looks) == (3, [3, 3, 3, 5, 3, 5])


def test_where_a_search_takes_long_there_are_few(host: Host) -> None:
    host.search_s = 1.0
    host.tick()
    for _ in range(18):
        host.tick(1.0)
    assert host.searches == 1
    host.tick(2.0)
    assert host.searches == 2


@pytest.mark.parametrize("state", ["gone", "zombie"])
def test_one_that_was_there_and_is_not_replaced_is_lost(host: Host, state: str) -> None:
    host.pids = {0: 70, 2: 72}
    assert not host.tick()
    host.states[70], host.pids = state, {2: 72}
    assert not host.tick()
    assert host.tick()
    # Whom the report is about.
    assert [(peer.rank, peer.pid) for peer in host.known] == [(3, 70), (5, 72)]


def test_one_that_was_started_again_is_not_lost(host: Host) -> None:
    """A script that prepares, and then starts another program under the same environment."""
    host.pids = {0: 70, 2: 72}
    host.tick()
    host.states[70], host.pids = "gone", {2: 72}
    assert not host.tick()
    host.pids = {0: 75, 2: 72}
    assert not any(host.tick() for _ in range(3))
    assert [peer.pid for peer in host.known] == [75, 72]


def test_one_that_never_came_is_not_lost(host: Host) -> None:
    host.pids = {2: 72}
    assert not any(host.tick() for _ in range(5))


def test_what_cannot_be_seen_hurts_nobody(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_: RankInfo) -> ProcessFacts:
        raise psutil.AccessDenied(70)

    host.pids = {0: 70, 2: 72}
    monkeypatch.setattr(host, "look_at", forbidden)
    assert not any(host.tick() for _ in range(3))
    assert [peer.pid for peer in host.known] == [70, 72]


def test_once_they_have_met_their_cards_count_and_nobody_is_searched_for(host: Host) -> None:
    host.pids = {0: 70, 2: 72}
    host.tick()
    host.states[70], host.pids = "gone", {2: 72}
    host.tick()
    assert host.tick()
    exchange = MemoryExchange()
    left = {rank: RankInfo(rank=rank, host="node", pid=100 + rank, guard_threads=(100 + rank,)) for rank in (3, 5)}
    exchange.set("info/3", codec.encode(left[3]))
    host.neighbours.meet(exchange)
    assert not host.neighbours.has_lost and not host.neighbours.wait_until_met(0.0)
    assert [peer.pid for peer in host.known] == [70, 72]
    exchange.set("info/5", codec.encode(left[5]))
    host.neighbours.meet(exchange)
    assert host.known == (left[3], left[5]) and host.neighbours.wait_until_met(0.0)
    searches = host.searches
    host.neighbours.search()
    host.tick()
    assert (host.searches, host.known) == (searches, (left[3], left[5]))


def test_a_card_of_another_host_is_none_of_a_neighbour(host: Host) -> None:
    exchange = MemoryExchange()
    exchange.set("info/3", codec.encode(RankInfo(rank=3, host="node", pid=1)))
    exchange.set("info/5", codec.encode(RankInfo(rank=5, host="container-2", pid=1)))
    host.neighbours.meet(exchange)
    assert [peer.rank for peer in host.known] == [3]


def test_a_search_that_does_not_end_is_left_behind(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what it tells of a process, the kernel waits for a lock that one which is stuck on storage may hold."""
    monkeypatch.setattr(module, "_SEARCH_S", 0.1)
    answers = threading.Event()

    def find(master_port: str, ranks_here: range) -> dict[int, int]:
        host.searches += 1
        answers.wait(30)
        return {3: 70}

    neighbours = host.local_ranks(find=find)
    try:
        for _ in range(2):
            neighbours.search()
            assert host.known == ()
        assert host.searches == 1
    finally:
        answers.set()
    join_own_threads("search")
    neighbours.search()
    assert [peer.pid for peer in host.known] == [70]
