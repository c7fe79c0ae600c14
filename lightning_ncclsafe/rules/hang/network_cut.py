"""The cause network-cut: connections between hosts are lost while the ranks on both sides are alive."""

import re
from collections import Counter
from collections.abc import Iterator

from lightning_ncclsafe.facts import Phase, TriedAddress
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Plan,
    Severity,
    Timeline,
    batch_words,
    collective_words,
    finding,
    hang_rule,
    has_given_up,
    lost_words,
    ranks_words,
    tried_words,
    verb,
)

# "[10.0.0.2]:31337", "10.0.0.2<51000>", "node-1<40321>"
_NAMED = re.compile(r"[\w.-]+(?=<\d+>)|(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_NO_ROUTE = re.compile(r"no route|unreachable|is down")
_REMEDY_ONE_HOST = (
    "All ranks are on one host, so no cable is at fault: look for what closes or resets their connections, a firewall "
    "on the host, an interface that went down (dmesg, ip -s link), code that closes file descriptors or destroys the "
    "process group on some rank."
)
_REMEDY = (
    "Look at the network between these hosts on the interface that was used: link and error counters (ethtool -S, "
    "ibstat, perfquery), the switch's log, a firewall or NAT that drops long-lived connections, cables. With "
    "InfiniBand, NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT bridge short interruptions."
)


@hang_rule(after="unreachable-host", remedy=_REMEDY, plan=Plan.RESTART)
def network_cut(view: Timeline) -> Iterator[Finding]:
    """Ranks report lost connections although every one of them is alive.

    Symptom:
        "Connection reset by peer", "Connection closed by peer", "socket error", "NET/IB … status=12" on some ranks, or
        all wait in the same collective. No rank raised anything else, and no process is dead.

    Cause:
        A link, NIC, cable or switch port that fails for a moment, or a firewall that drops idle connections.

    Remedy:
        Check the links of the host that the messages have in common.

    Cannot see:
        Which cable it was; on a single host, who closed the connections. For a host that does not answer at all see
        unreachable-host; for a process that is gone, dead-rank.
    """
    messages = {rank: text for rank, facts in view.facts.items() if (text := lost_words(facts))}
    where = view.hosts
    # Gloo closes connections by itself after ranks have called different collectives.
    if not _all_alive(view) or any(map(has_given_up, view.facts.values())) or (messages and view.lost_divergence):
        return
    if messages:
        yield _finding(view, messages, where)
    elif cut := tuple(one for one in view.job.tried if one.answers is False):
        yield from _silently_cut(view, cut, where)


def _all_alive(view: Timeline) -> bool:
    """Whether every rank answers and has neither failed by itself nor finished."""
    finished = any(facts.progress.phase is Phase.FINISHED for facts in view.facts.values())
    return not view.silent and not view.raised and not finished


def _finding(view: Timeline, messages: dict[int, str], where: dict[int, str]) -> Finding:
    several = len({*where.values()}) > 1
    host = _common_host(view, messages, where) if several else ""
    there = tuple(sorted(rank for rank, name in where.items() if name == host)) if host else ()
    ranks = there or tuple(sorted(messages))
    to = f"to {host} ({ranks_words(there)})" if host else f"between {'hosts' if several else 'ranks of one host'}"
    facts = view.facts[ranks[0]]
    text = (
        f"Connections {to} were lost, {batch_words(facts.progress)}: {ranks_words(messages)} "
        f"{verb(tuple(messages), 'reports', 'report')} it, and the processes of all {len(view.facts)} ranks are alive."
    )
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR,
        evidence=_evidence(view, messages),
        remedy=_REMEDY if several else _REMEDY_ONE_HOST,
        location="",
    )


def _silently_cut(view: Timeline, cut: tuple[TriedAddress, ...], where: dict[int, str]) -> Iterator[Finding]:
    """Packets are dropped silently: all ranks have joined a collective, and a host cannot be reached at its address."""
    joined = next((calls for group in view.groups if (calls := view.joined(group))), None)
    if not view.waiting or view.stragglers or joined is None:
        return
    # If no other host is reached, this one is cut off.
    is_own = len(cut) == len(view.job.tried) > 1
    names = [cut[0].seen_from] if is_own else [one.host for one in cut]
    ranks = tuple(sorted(rank for rank, host in where.items() if host in names))
    what = collective_words(joined[min(joined)])
    text = (
        f"All ranks have called {what}, and {cut[0].host} cannot be reached from {cut[0].seen_from} at "
        f"{cut[0].address}, where its data should go, although its ranks answer by other means: the connection to "
        f"{', '.join(names[:4])} is cut."
    )
    yield finding(
        view,
        ranks,
        text,
        confidence=Confidence.LIKELY if _is_conclusive(view.job.tried, cut) else Confidence.POSSIBLE,
        evidence=(
            *(Evidence(source="network", text=tried_words(one)) for one in view.job.tried[:LISTED]),
            *_interfaces(view),
        ),
        location="",
    )


def _is_conclusive(tried: tuple[TriedAddress, ...], cut: tuple[TriedAddress, ...]) -> bool:
    """Whether it is not merely a firewall that drops the probe: other hosts answer, or there is no route."""
    return any(one.answers for one in tried) or any(_NO_ROUTE.search(one.tried) for one in cut)


def _common_host(view: Timeline, messages: dict[int, str], where: dict[int, str]) -> str:
    """The host that most ranks on other hosts have lost, if no other is named as often; else empty."""
    owners = dict(_addresses(view)) | {name: name for name in where.values()}
    lost: Counter[str] = Counter()
    for rank, text in messages.items():
        named = {owners[address] for address in _NAMED.findall(text) if address in owners}
        lost.update(named - {where.get(rank, "")})
    most = lost.most_common(2)
    is_one = bool(most) and (len(most) == 1 or most[0][1] > most[1][1])
    return most[0][0] if is_one else ""


def _addresses(view: Timeline) -> Iterator[tuple[str, str]]:
    """Addresses and their hosts, without addresses that several hosts have, such as a bridge's."""
    owners: dict[str, set[str]] = {}
    for facts in view.facts.values():
        interface = facts.machine.interface
        if interface is not None:
            for address in (interface.address, *(other.rpartition(" ")[2] for other in interface.others)):
                owners.setdefault(address, set()).add(facts.host)
    return ((address, next(iter(names))) for address, names in owners.items() if len(names) == 1)


def _evidence(view: Timeline, messages: dict[int, str]) -> Iterator[Evidence]:
    for rank, text in sorted(messages.items())[:LISTED]:
        yield Evidence(source="exception", rank=rank, text=text)
    yield Evidence(source="process", text=f"Every rank has answered: {ranks_words(view.facts)}.")
    yield from _interfaces(view)


def _interfaces(view: Timeline) -> Iterator[Evidence]:
    for rank, facts in sorted(view.facts.items())[:LISTED]:
        interface = facts.machine.interface
        if interface is not None and interface.name:
            text = f"{interface.backend} uses {interface.name} {interface.address} ({interface.chosen_by})."
            yield Evidence(source="network", rank=rank, text=text)
