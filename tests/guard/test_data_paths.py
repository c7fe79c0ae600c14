"""Which addresses of a job's hosts are tried: on this machine's loopback, where every address answers."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from lightning_ncclsafe.facts import (
    Action,
    Incident,
    IncidentKind,
    InterfaceFacts,
    JobFacts,
    MachineFacts,
    Phase,
    Progress,
    RankFacts,
    TriedAddress,
)
from lightning_ncclsafe.guard import rank_hosts


def rank(number: int, host: str, address: str, **more: bool) -> RankFacts:
    taken = InterfaceFacts(backend="gloo", name="eth0", address=address, **more)
    progress = Progress(phase=Phase.TRAIN, actions=(Action(name="barrier:epoch_end", for_s=20.0),))
    return RankFacts(rank=number, host=host, progress=progress, machine=MachineFacts(interface=taken))


def at_work(facts: RankFacts) -> RankFacts:
    return replace(facts, progress=Progress(phase=Phase.TRAIN))


def job(*ranks: RankFacts, kind: IncidentKind = IncidentKind.SUSPECT) -> JobFacts:
    return JobFacts(incident=Incident(number=1, kind=kind, opened_by=0), world_size=len(ranks), ranks=ranks)


def tried(facts: JobFacts) -> tuple[TriedAddress, ...]:
    return rank_hosts.RankHosts(rank=0, world_size=facts.world_size, host="node-1").complete(facts).tried


HERE = rank(0, "node-1", "127.0.0.1")
THERE = (rank(1, "node-2", "127.0.0.2"), rank(2, "node-2", "127.0.0.2"), rank(3, "node-3", "127.0.0.3"))


def test_each_other_host_is_tried_once() -> None:
    found = tried(job(HERE, *THERE))
    assert [(one.host, one.address, one.answers, one.seen_from) for one in found] == [
        ("node-2", "127.0.0.2", True, "node-1"),
        ("node-3", "127.0.0.3", True, "node-1"),
    ]
    assert all(one.tried for one in found)


@pytest.mark.parametrize(
    "facts",
    [
        job(HERE),
        job(HERE, *THERE, kind=IncidentKind.EXCEPTION),
        job(HERE, at_work(THERE[0])),
        replace(job(HERE, *THERE), world_size=5),
        # A bridge has the same address on every host; loopback leads nowhere; of some nothing is known.
        job(HERE, rank(1, "node-2", "127.0.0.1")),
        job(HERE, rank(1, "node-2", "127.0.0.2", is_loopback=True)),
        job(HERE, replace(THERE[0], machine=MachineFacts())),
        job(HERE, replace(THERE[0], host="")),
    ],
)
def test_nothing_is_tried_where_the_result_would_mean_nothing(facts: JobFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_connecting(addresses: Iterable[str], **_: float) -> dict[str, rank_hosts.ConnectionAttempt]:
        assert not [*addresses]
        return {}

    monkeypatch.setattr(rank_hosts, "try_connecting", try_connecting)
    assert tried(facts) == ()
