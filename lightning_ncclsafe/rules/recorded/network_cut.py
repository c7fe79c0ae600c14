"""The cause network-cut, in a log: a connection between ranks could not be made, or stopped answering."""

import re
from collections.abc import Iterator

from lightning_ncclsafe.facts import StatementKind
from lightning_ncclsafe.rules.kit import Confidence, Finding, Timeline, finding, recorded_rule
from lightning_ncclsafe.rules.recorded.kit.ends import a_timeout_expired, failed
from lightning_ncclsafe.rules.recorded.kit.statements import LogStatements, stated

# Only when connecting: during a transfer, the address has worked.
_LINK_LOCAL = re.compile(r"\b(?:connecting to|the store at) \W{0,4}fe80:", re.IGNORECASE)
_REMEDY = (
    "Read the logs of all ranks first: a process that has died looks the same to its peers, and its own log says why. "
    "If none did, look at the links between these hosts: error counters of the network cards, the kernel's log, a "
    "firewall between their ports, and a run with NCCL_DEBUG=INFO for the interfaces that are chosen."
)
_REMEDY_LINK_LOCAL = (
    "Name the interface that leads to the other hosts, NCCL_SOCKET_IFNAME=IFNAME (ip route get ADDRESS_OF_ANOTHER_HOST "
    "shows which), or NCCL_SOCKET_FAMILY=AF_INET: an address that begins with fe80: is valid on one link only."
)


@recorded_rule(after="no-dump")
def network_cut(view: Timeline) -> Iterator[Finding]:
    """NCCL or the store could not connect to another rank, or that rank stopped answering.

    Symptom:
        "Connect to 10.0.0.2<45763> failed", "Got completion from peer … with status=12", "The client socket has timed
        out … while trying to connect".

    Cause:
        A link or a network card, a firewall, an interface that leads nowhere; or the process at the other end is dead.

    Remedy:
        Read the log of the other end; check the link, and the interfaces that are chosen.

    Cannot see:
        Whether the process at the other end was alive: both look alike from here.
    """
    found = stated(view, StatementKind.UNREACHABLE)
    if found and not failed(view) and not a_timeout_expired(view):
        yield _finding(view, found)


def _finding(view: Timeline, found: LogStatements) -> Finding:
    details = found.details
    more = f", and {len(details) - 1} more like it" if len(details) > 1 else ""
    is_link_local = _LINK_LOCAL.search(details[0]) is not None
    why = "that is an address of a single link" if is_link_local else "the network, or the process at the other end"
    return finding(
        view,
        (),
        f"{details[0]}{more}: {why}.",
        confidence=Confidence.LIKELY if is_link_local else Confidence.POSSIBLE,
        evidence=found.evidence,
        remedy=_REMEDY_LINK_LOCAL if is_link_local else _REMEDY,
    )
