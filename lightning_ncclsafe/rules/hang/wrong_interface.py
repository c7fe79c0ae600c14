"""The cause wrong-interface: the network interfaces that ranks use do not reach each other."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_ncclsafe.facts import InterfaceFacts, Phase
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Timeline,
    clause,
    finding,
    hang_rule,
    ranks_by,
    ranks_words,
    verb,
    waits_in_init,
)

# Bridges and tunnels of containers and virtual machines, which end on the host.
_BRIDGE = re.compile(r"(?:docker|br-|veth|virbr|cni|cbr|lxc|lxd|podman|vmnet|vboxnet)")
_REMEDY = (
    "Name the interface that leads to the other hosts on every one of them: {variable}=IFNAME (ip route get "
    "ADDRESS_OF_ANOTHER_HOST shows which it is). ncclsafe preflight compares them before the next start."
)


@dataclass(frozen=True, slots=True)
class _Problem:
    ranks: tuple[int, ...]
    text: str
    confidence: Confidence


@hang_rule(after="gil-held")
def wrong_interface(view: Timeline) -> Iterator[Finding]:
    """Nothing ever got through between hosts, and the network interfaces that ranks use cannot reach each other.

    Symptom:
        At the start all ranks wait in init_process_group or in the first collective; then "Connection refused",
        "connect timed out", "Gloo connectFullMesh failed". On one host everything works.

    Cause:
        The first interface of a host is docker0, another bridge or a management network; GLOO_SOCKET_IFNAME or
        NCCL_SOCKET_IFNAME names a wrong one; /etc/hosts maps the host's name to 127.0.1.1.

    Remedy:
        Name the interface to use.

    Cannot see:
        Firewalls, and routes between different networks; the interface of a rank that does not answer.
    """
    where = view.hosts
    taken = {
        rank: interface for rank, facts in view.facts.items() if (interface := facts.machine.interface) is not None
    }
    if not taken or not _spans_hosts(view, where) or not _waits_at_start(view):
        return
    problems = [*_loopback(taken), *_same_address(taken, where), *_bridges(taken), *_different_networks(taken)]
    for problem in problems[:1]:
        yield _finding(view, taken, problem, () if _are_several(where) else _unseen(view))


def _spans_hosts(view: Timeline, where: dict[int, str]) -> bool:
    """Whether there are several hosts, or ranks that no other rank sees."""
    return _are_several(where) or bool(_unseen(view))


def _are_several(where: dict[int, str]) -> bool:
    return len({*where.values()}) > 1


def _unseen(view: Timeline) -> tuple[int, ...]:
    """The ranks that may run on another host; empty if all should run on one."""
    if any(facts.local_world_size == view.job.world_size for facts in view.facts.values()):
        return ()
    return tuple(rank for rank in view.silent if rank not in view.witnesses)


def _waits_at_start(view: Timeline) -> bool:
    """Whether all ranks wait, or gave up waiting, and no collective has ever completed."""
    waits = view.waiting or [rank for rank, facts in view.facts.items() if waits_in_init(facts)]
    if not waits or view.raised or view.stragglers:
        return False
    for facts in view.facts.values():
        if facts.progress.phase not in (Phase.INIT, Phase.UNKNOWN, Phase.SANITY_CHECK, Phase.TRAIN):
            return False
        if any(entry.completed for entry in facts.collectives) or any(g.last_completed > 0 for g in facts.groups):
            return False
    return True


def _loopback(taken: dict[int, InterfaceFacts]) -> Iterator[_Problem]:
    ranks = tuple(sorted(rank for rank, interface in taken.items() if interface.is_loopback))
    if ranks:
        text = clause(ranks, "uses|use the loopback interface, which reaches no other host")
        yield _Problem(ranks, text, Confidence.LIKELY)


def _same_address(taken: dict[int, InterfaceFacts], where: dict[int, str]) -> Iterator[_Problem]:
    users = ranks_by({rank: interface.address for rank, interface in sorted(taken.items())})
    for address, ranks in users.items():
        if address and len({where.get(rank, "") for rank in ranks}) > 1:
            name = taken[ranks[0]].name
            text = f"{ranks_words(ranks)} on different hosts use the same address {address} ({name}), a bridge's"
            yield _Problem(ranks, text, Confidence.LIKELY)


def _bridges(taken: dict[int, InterfaceFacts]) -> Iterator[_Problem]:
    ranks = tuple(sorted(rank for rank, interface in taken.items() if _BRIDGE.match(interface.name)))
    if ranks:
        name = taken[ranks[0]].name
        text = f"{clause(ranks, 'uses|use')} {name}, a bridge that usually reaches only its own host"
        yield _Problem(ranks, text, Confidence.LIKELY)


def _different_networks(taken: dict[int, InterfaceFacts]) -> Iterator[_Problem]:
    """Different networks: a route may lead from one to the other."""
    networks = ranks_by({rank: one.network for rank, one in sorted(taken.items()) if one.network})
    if len(networks) > 1:
        fewest = min(networks.values(), key=len)
        listed = ", ".join(f"{ranks_words(ranks)} in {network}" for network, ranks in [*networks.items()][:4])
        yield _Problem(fewest, f"ranks use addresses in different networks: {listed}", Confidence.POSSIBLE)


def _finding(view: Timeline, taken: dict[int, InterfaceFacts], problem: _Problem, unseen: tuple[int, ...]) -> Finding:
    """The finding; only possible if ranks may be on another host, or were not started on this one."""
    backend = taken[problem.ranks[0]].backend
    waits = clause(tuple(view.facts), "waits|wait")
    return finding(
        view,
        problem.ranks,
        f"{problem.text}, and no collective has ever come through: {waits} at the start{_condition_words(unseen)}.",
        confidence=Confidence.POSSIBLE if unseen else problem.confidence,
        evidence=_evidence(taken),
        remedy=_REMEDY.format(variable="NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"),
        location="",
    )


def _condition_words(unseen: tuple[int, ...]) -> str:
    """Under which condition this is the cause: on a single host, any interface works."""
    runs = f"{ranks_words(unseen)}, of which nothing is known, {verb(unseen, 'runs', 'run')} on another host"
    return f"; this is the cause if {runs}" if unseen else ""


def _evidence(taken: dict[int, InterfaceFacts]) -> Iterator[Evidence]:
    for rank, interface in sorted(taken.items())[:LISTED]:
        others = f"; its host also has {', '.join(interface.others[:4])}" if interface.others else ""
        text = f"{interface.backend} takes {interface.name or 'no interface'} {interface.network or interface.address}"
        yield Evidence(source="network", rank=rank, text=f"{text} ({interface.chosen_by}){others}.")
