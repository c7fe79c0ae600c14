"""Interfaces through which hosts cannot reach each other, or not as fast as possible."""

import ipaddress
from collections.abc import Collection, Iterator
from dataclasses import replace

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit import Confidence, JobHosts, Severity, spread_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check
from lightning_ncclsafe.rules.preflight.settings import switched_on

# Addresses with this many equal bits count as one network; the real mask is unknown.
_IPV4_PREFIX = 16
_IPV6_PREFIX = 48
_LOOPBACK = ("lo", "lo0")


@check(
    after="silent-at-preflight",
    remedy=(
        "Name the interface that leads to the other hosts on each of them: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME "
        "(ip route get ADDRESS_OF_ANOTHER_HOST shows which one it is; '^docker,lo' leaves some out)."
    ),
)
def unreachable_interface(view: JobHosts) -> Iterator[Problem]:
    """A named interface does not exist; hosts have none, or the same address, different networks or different speeds.

    Symptom:
        The process group cannot be created ("Unable to find address for: eth9") or is never complete, or the first
        collective hangs on all ranks; or one host is slow in all.

    Cause:
        The first interface of a host is a bridge of Docker or a virtual machine, a management network, or one that is
        down; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that does not exist there; /etc/hosts gives
        the host's own name the address 127.0.1.1, which gloo then takes.

    Remedy:
        Name the interface to use.

    Cannot see:
        Firewalls, and routes between different networks, over which hosts may well reach each other.
    """
    misnamed = tuple(_misnamed(view))
    yield from misnamed
    if view.several:
        reported = {rank for problem in misnamed for rank in problem.ranks}
        between = (*_absent(view, reported), *_same_address(view), *_different_networks(view), *_slower(view))
        yield from (replace(problem, confidence=Confidence.LIKELY) for problem in between)


def _misnamed(view: JobHosts) -> Iterator[Problem]:
    """Variables that name a missing interface; on a single host, too, as a back end looks for it at once."""
    for rank, facts in view.facts.items():
        names = ", ".join(line.partition(" ")[0] for line in facts.network.interfaces) or "only loopback"
        for setting in facts.network.misnamed:
            severity = _severity(setting, facts)
            if severity is not None:
                text = f"{setting} fits no interface of the host, which has {names}"
                yield Problem(ranks=(rank,), text=text, badness=4.0, severity=severity)


def _severity(setting: str, facts: PreflightFacts) -> Severity | None:
    """How bad it is, by the back end that the run uses; some runs use gloo beside NCCL. None for an unused one."""
    if setting.startswith("NCCL"):
        return Severity.ERROR if facts.is_cuda else None
    # From the shell it is unknown what a run would use: without a GPU, gloo.
    return Severity.WARNING if facts.is_cuda and facts.gpu is not None else Severity.ERROR


def _absent(view: JobHosts, reported: Collection[int]) -> Iterator[Problem]:
    without = tuple(
        rank for rank, facts in view.facts.items() if not facts.network.default_interface and rank not in reported
    )
    if without and len(without) < len(view.facts):
        yield Problem(ranks=without, text="no interface by which other hosts could be reached", badness=3.0)
    loopback = tuple(rank for rank, facts in view.facts.items() if _is_loopback(facts))
    if loopback:
        text = "the loopback interface would be taken, which reaches no other host"
        yield Problem(ranks=loopback, text=text, badness=3.0)


def _is_loopback(facts: PreflightFacts) -> bool:
    """Whether the back end would choose loopback by itself: set by a variable, it is a harmful setting."""
    return facts.network.default_interface in _LOOPBACK and not facts.network.chosen_by.endswith("_SOCKET_IFNAME")


def _same_address(view: JobHosts) -> Iterator[Problem]:
    for address, ranks in view.known(_address).parts:
        hosts = [host for host in view.hosts if set(host.ranks) & set(ranks)]
        if len(hosts) > 1:
            text = f"{len(hosts):,} hosts have the same address {address}, a bridge's probably"
            yield Problem(ranks=ranks, text=text, badness=2.0)


def _different_networks(view: JobHosts) -> Iterator[Problem]:
    groups = view.known(lambda facts: _network(_address(facts)))
    if groups.differ:
        names = {rank: facts.network.default_interface for rank, facts in view.facts.items()}
        text = f"addresses are in different networks: {spread_words(groups)} (interface {names[groups.deviating[0]]})"
        yield Problem(ranks=groups.deviating, text=text, badness=1.0)


def _slower(view: JobHosts) -> Iterator[Problem]:
    groups = view.known(_speed)
    if groups.differ:
        yield Problem(ranks=groups.deviating, text=f"interfaces have different speeds: {spread_words(groups)}")


def _words(facts: PreflightFacts) -> list[str]:
    """The words of the default interface's line: its name, speed, unit and address."""
    name = facts.network.default_interface
    return next((words for line in facts.network.interfaces if (words := line.split()) and words[0] == name), [])


def _address(facts: PreflightFacts) -> str | None:
    return next((word for word in _words(facts)[1:] if _network(word)), None)


def _network(address: str | None) -> str | None:
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return None
    prefix = _IPV4_PREFIX if found.version == 4 else _IPV6_PREFIX
    return str(ipaddress.ip_network(f"{found}/{prefix}", strict=False))


def _speed(facts: PreflightFacts) -> str | None:
    words = _words(facts)
    return " ".join(words[1:3]) if len(words) > 2 and words[2].endswith("/s") else None


@check(
    after="different-settings",
    remedy=(
        "Let NCCL use InfiniBand on every host: devices under /dev/infiniband and libibverbs in the container, all "
        "ports active (ibstat), locked memory unlimited (ulimit -l); NCCL_DEBUG=INFO on one rank shows what it uses."
    ),
)
def socket_fallback(view: JobHosts) -> Iterator[Problem]:
    """Active InfiniBand ports are not used, or hosts have different numbers of them.

    Symptom:
        Collectives are many times slower than they should be; or the first one hangs because some ranks wait on
        InfiniBand and others on sockets.

    Cause:
        A container without the devices or libraries of InfiniBand, a port that is down, a host of another kind.

    Remedy:
        Provide the same working ports on all hosts.

    Cannot see:
        Whether the ports reach each other; other fast networks than InfiniBand and RoCE.
    """
    if view.several:
        yield from _unused(view)
        yield from _unequal(view)


def _unused(view: JobHosts) -> Iterator[Problem]:
    for rank, facts in view.facts.items():
        network = facts.network
        # Switched off by a variable, it is reported as a harmful setting.
        if network.infiniband_active > 0 and network.infiniband_off and not switched_on(facts, "NCCL_IB_DISABLE"):
            text = f"NCCL would not use {_ports(network.infiniband_active)}: {network.infiniband_off.rstrip('.')}"
            yield Problem(ranks=(rank,), text=text, badness=1.0)


def _unequal(view: JobHosts) -> Iterator[Problem]:
    groups = view.by(lambda facts: facts.network.infiniband_active)
    usual = groups.parts[0][0] if groups.parts else 0
    for count, ranks in groups.parts[1:]:
        yield Problem(ranks=ranks, text=f"{_ports(count)}, other hosts have {usual:,}", badness=float(count == 0))


def _ports(count: int) -> str:
    return f"{count or 'no':} active InfiniBand {'port' if count == 1 else 'ports'}"
