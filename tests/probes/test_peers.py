"""The other ranks of a host, as one rank sees them: those that run are asked, and growth takes two looks."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from lightning_ncclsafe.facts import Frame, ProcessFacts
from lightning_ncclsafe.probes.peers import Peers
from lightning_ncclsafe.probes.process.crash_traces import CrashTrace, CrashTraces
from lightning_ncclsafe.probes.process.growth import LEAST_S, MemoryGrowth
from lightning_ncclsafe.probes.rank_info import RankInfo

LINE = Frame(file="/home/me/train.py", line=9, function="training_step", user=True)
PEER = RankInfo(rank=1, host="h", pid=77)
BLOCKED = ProcessFacts(pid=77, rank=1, state="disk-sleep", rss_bytes=5_000_000_000, swap_bytes=0)
Make = Callable[..., Peers]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Peers] = []

    def make_peers(
        *looks: ProcessFacts, asked: list[RankInfo] | None = None, growth: MemoryGrowth | None = None
    ) -> Peers:
        """Peers of which each look sees the next of these, and which answer with a line if they are asked."""
        left = iter(looks)

        def ask(peer: RankInfo) -> tuple[tuple[Frame, ...], bool]:
            assert asked is not None, "nobody is to be asked"
            asked.append(peer)
            return (LINE,), True

        made.append(Peers(ask=ask, growth=growth or MemoryGrowth(), look_at=lambda *_, **__: next(left)))
        return made[-1]

    yield make_peers
    for peers in made:
        peers.close()


@pytest.mark.parametrize(
    ("state", "is_asked"), [("sleeping", True), ("running", True), ("stopped", False), ("gone", False)]
)
def test_only_a_running_silent_peer_is_asked_for_its_stack(make: Make, state: str, is_asked: bool) -> None:
    asked: list[RankInfo] = []
    peers = make(*[ProcessFacts(pid=77, rank=1, state=state)] * 2, asked=asked)
    (seen,) = peers.witness([PEER])
    assert (seen.rank, seen.pid, seen.state) == (1, 77, state)
    assert (seen.stack, seen.gil_held) == (((LINE,), True) if is_asked else ((), False))
    assert asked == [PEER] * is_asked


def test_a_process_that_exists_is_seen() -> None:
    peers = Peers(ask=lambda _: ((), False), growth=MemoryGrowth())
    peers.known = (replace(PEER, pid=os.getpid()),)
    (seen,) = peers.look()
    peers.close()
    assert (seen.pid, seen.rank) == (os.getpid(), 1) and seen.state in ("running", "sleeping") and seen.rss_bytes


@pytest.mark.parametrize(
    ("traced", "seen", "ended_by"),
    [
        ("SIGABRT", "SIGSEGV", "SIGABRT"),
        ("", "SIGSEGV", "SIGSEGV"),
        ("SIGSEGV", "", "SIGSEGV"),
        ("", "SIGKILL", "SIGKILL"),
    ],
)
def test_an_abort_that_crashes_as_it_writes_its_trace_is_an_abort(
    make: Make, monkeypatch: pytest.MonkeyPatch, traced: str, seen: str, ended_by: str
) -> None:
    monkeypatch.setattr(CrashTraces, "of", lambda self, pid: CrashTrace(traced, ()))
    assert make(ProcessFacts(pid=77, rank=1, state="zombie", ended_by=seen)).look_at(PEER).ended_by == ended_by


def test_a_silent_peer_is_sampled_twice_for_its_growth(make: Make) -> None:
    peers = make(BLOCKED, replace(BLOCKED, rss_bytes=5_100_000_000, swap_bytes=10_000_000))
    began_s = time.monotonic()
    (facts,) = peers.witness([PEER])
    took_s = time.monotonic() - began_s
    assert took_s >= LEAST_S
    assert facts.rss_bytes == 5_100_000_000
    assert facts.memory_growth_bytes_per_s is not None and facts.swap_growth_bytes_per_s is not None
    # Of the time between the two looks, which is a part of all that it took.
    assert 100_000_000 / took_s <= facts.memory_growth_bytes_per_s <= 100_000_000 / LEAST_S
    assert 10_000_000 / took_s <= facts.swap_growth_bytes_per_s <= 10_000_000 / LEAST_S


def test_growth_is_known_on_a_slow_host() -> None:
    """Where the first look alone takes longer than the time until the second."""
    looks = iter([(LEAST_S, BLOCKED), (0.0, replace(BLOCKED, rss_bytes=5_100_000_000))])

    def look_slowly(pid: int, *, rank: int, started: float | None) -> ProcessFacts:
        takes_s, seen = next(looks)
        time.sleep(takes_s)  # Stands for a busy host.
        return seen

    peers = Peers(ask=lambda _: ((), False), growth=MemoryGrowth(), look_at=look_slowly)
    (facts,) = peers.witness([PEER])
    peers.close()
    assert facts.memory_growth_bytes_per_s is not None


def test_a_peer_sampled_before_needs_no_second_look(make: Make) -> None:
    now_s = 0.0
    grown = replace(BLOCKED, rss_bytes=5_100_000_000)
    peers = make(BLOCKED, grown, ProcessFacts(pid=78, rank=2, state="gone"), growth=MemoryGrowth(clock=lambda: now_s))
    peers.look_at(PEER)
    now_s = 2.0
    facts, gone = peers.witness([PEER, RankInfo(rank=2, host="h", pid=78)])
    assert (facts.memory_growth_bytes_per_s, gone.state) == (50_000_000, "gone")
