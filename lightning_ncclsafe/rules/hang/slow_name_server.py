"""The cause slow-name-server: a rank waits for a name server to resolve a name or an address."""

import re
from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import NAME_LOOKUPS
from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Evidence,
    Finding,
    Plan,
    Timeline,
    hang_rule,
    how_we_know,
    straggler_finding,
)

# C functions have no frame, but the line that calls them. torch resolves the address of each connection.
_CALLS = re.compile(
    r"\b(?:TCPStore|rendezvous|getaddrinfo|gethostby\w+|getnameinfo|getfqdn|create_connection|urlopen)\("
)


@hang_rule(
    after="blocked-on-disk",
    remedy=(
        "Look at the name server on that host: how long does `getent hosts ADDRESS` take, for the addresses of all "
        "hosts and for ::ffff:127.0.0.1? Write names and addresses of the hosts into /etc/hosts, run a caching "
        "resolver on each host, or make a lost query cheap: RES_OPTIONS='timeout:1 attempts:1' in the environment."
    ),
    plan=Plan.RESTART,
)
def slow_name_server(view: Timeline) -> Iterator[Finding]:
    """A rank waits for a name server, usually while it connects to the job's store.

    Symptom:
        The start of a job takes five seconds longer than it should, or a multiple of that, now and then or on some
        hosts; some ranks wait in init_process_group, others in the constructor of TCPStore.

    Cause:
        torch looks up the name of each address that it connects to or is connected from (pytorch#159007), as other
        libraries do. A name server that is down, overloaded or behind a firewall does not answer, and glibc asks again
        after 5 s.

    Remedy:
        Put the names of all hosts into /etc/hosts, run a caching resolver, or shorten the timeout (RES_OPTIONS).

    Cannot see:
        Queries over TCP or HTTPS, or made by another process on the rank's behalf (nscd, systemd-resolved).
    """
    ranks = tuple(sorted(rank for rank, facts in view.facts.items() if _looks_up(facts)))
    if not ranks:
        return
    asked = sorted({server for rank in ranks for server in view.facts[rank].machine.name_servers})
    servers = f"the name server {asked[0]}" if len(asked) == 1 else f"the name servers {', '.join(asked[:LISTED])}"
    queries = (_query_evidence(rank, view.facts[rank]) for rank in ranks[:LISTED])
    evidence = (*queries, *how_we_know(view, ranks))
    yield straggler_finding(view, ranks, "is|are waiting for an answer from", f" {servers}", evidence=evidence)


def _looks_up(facts: RankFacts) -> bool:
    """Whether a query is unanswered and the main thread is where it may have made it: another thread may have, too."""
    if not facts.machine.name_servers or not facts.stack:
        return False
    inner = facts.stack[-1]
    return NAME_LOOKUPS.has(inner.file, inner.function) or _CALLS.search(inner.code) is not None


def _query_evidence(rank: int, facts: RankFacts) -> Evidence:
    servers = ", ".join(facts.machine.name_servers)
    return Evidence(source="network", rank=rank, text=f"A query to {servers}, port 53, has no answer yet.")
