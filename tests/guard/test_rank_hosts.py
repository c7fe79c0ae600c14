"""Who runs where is known to all, and hosts on which nobody answers are tried."""

import pytest

from lightning_ncclsafe.exchange import MemoryExchange, SharedMemory
from lightning_ncclsafe.facts import (
    Incident,
    IncidentKind,
    JobFacts,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
    SilentHost,
)
from lightning_ncclsafe.guard import rank_hosts
from lightning_ncclsafe.guard.rank_hosts import ConnectionAttempt, RankHosts, try_connecting
from lightning_ncclsafe.probes.network import own_address_towards

HOSTS = ["host-a", "host-a", "host-b", "host-b", "host-c"]
ADDRESSES = {"host-a": "10.0.0.1", "host-b": "10.0.0.2", "host-c": ""}


def everyone(shared: SharedMemory) -> list[RankHosts]:
    """All ranks, who have told and read."""
    world = [RankHosts(rank=rank, world_size=5, host=host, launch="torchrun x") for rank, host in enumerate(HOSTS)]
    exchange = MemoryExchange(shared)
    for where, host in zip(world, HOSTS, strict=True):
        where.announce(exchange, ADDRESSES[host])
        world[0].meet(exchange)
    for where in world:
        where.meet(exchange)
    return world


def job(*answering: int, **more: object) -> JobFacts:
    incident = Incident(number=1, kind=IncidentKind.TIMEOUT, opened_by=0)
    ranks = tuple(RankFacts(rank=rank, progress=Progress(phase=Phase.TRAIN)) for rank in answering)
    return JobFacts(incident=incident, world_size=5, ranks=ranks, **more)  # type: ignore[arg-type]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were tried; none of them answers."""
    tried: list[str] = []

    def nobody(addresses: object) -> dict[str, ConnectionAttempt]:
        tried.extend(addresses)  # type: ignore[call-overload]
        return {address: ConnectionAttempt(answers=False, tried="no answer within 1 s") for address in tried}

    monkeypatch.setattr(rank_hosts, "try_connecting", nobody)
    return tried


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_on_which_nobody_answers_is_tried_by_whoever_reports(rank: int, tried: list[str]) -> None:
    found = everyone(SharedMemory())[rank].complete(job(0, 1, 4))
    unreached = "no answer within 1 s"
    assert found.silent_hosts == (
        SilentHost(host="host-b", ranks=(2, 3), address="10.0.0.2", answers=False, seen_from="host-a", tried=unreached),
    )
    assert (tried, found.launch) == (["10.0.0.2"], "torchrun x")


def test_a_host_of_which_no_address_is_known_is_not_tried(tried: list[str]) -> None:
    (host,) = everyone(SharedMemory())[0].complete(job(0, 1, 2, 3)).silent_hosts
    assert (host.host, host.answers, tried) == ("host-c", None, [])


@pytest.mark.parametrize("where", ["witnessed", "answering"])
def test_a_host_on_which_somebody_is_seen_is_not_silent(where: str, tried: list[str]) -> None:
    seen = ProcessFacts(pid=1, rank=3, state="stopped")
    facts = job(0, 1, 4, witnessed=(seen,)) if where == "witnessed" else job(0, 1, 2, 4)
    assert everyone(SharedMemory())[0].complete(facts).silent_hosts == ()
    assert tried == []


def test_nothing_is_claimed_before_all_ranks_have_answered(tried: list[str]) -> None:
    exchange = MemoryExchange()
    first = RankHosts(rank=1, world_size=2, host="host-a")
    first.announce(exchange, "10.0.0.1")
    first.meet(exchange)
    assert first.complete(job(0, 1)).silent_hosts == ()


def test_a_host_that_runs_answers_whether_or_not_something_listens() -> None:
    assert try_connecting(["127.0.0.1"])["127.0.0.1"].answers


def test_a_value_that_is_no_address_means_nothing() -> None:
    assert try_connecting(["no address"])["no address"].answers is None


def test_an_address_by_which_only_this_host_knows_itself_is_none() -> None:
    assert own_address_towards("127.0.0.1", "29500") == ""
    assert own_address_towards("no.such.host.invalid", "29500") == ""
