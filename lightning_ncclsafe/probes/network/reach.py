"""Whether hosts answer on the network, and reach each other where their back ends send data."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ncclsafe.facts import IncidentKind, InterfaceFacts, JobFacts, RankFacts, TriedAddress
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.rules.kit.activity import activity

# Any port would do: a host that runs refuses a connection that nothing listens for. This one is rarely filtered.
_PORT = 22
_OWN_LINK = (errno.ENETUNREACH, errno.ENETDOWN)
_NO_ANSWER = (*_OWN_LINK, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)

# Of a larger job the first hosts are tried: a cut that matters is mostly that of one host, or of this one.
_MOST = 64
# The kernel needs 3 s to find that nobody has an address of a network that it is in itself.
_DEADLINE_S = 3.5
_STANDSTILLS = (IncidentKind.SUSPECT, IncidentKind.TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What came of an attempt to connect to a host.

    Attributes:
        answers: Whether the host itself answered; None where that cannot be told.
        tried: What came of it, in words.
    """

    answers: bool | None
    tried: str


def reach(addresses: Iterable[str], *, deadline_s: float = 1.0) -> dict[str, Reach]:
    """Tries to connect to each of these addresses, to all at the same time.

    Args:
        addresses: IPv4 or IPv6 addresses.
        deadline_s: Seconds that they have in all.

    Returns:
        What came of it, by address.
    """
    found: dict[str, Reach] = {}
    with selectors.DefaultSelector() as waiting:
        for address in dict.fromkeys(addresses):
            _begin(address, waiting, found)
        give_up = time.monotonic() + deadline_s
        while waiting.get_map() and (left_s := give_up - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                _end(waiting, key, _outcome(key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)), found)  # type: ignore[union-attr]
        for key in [*waiting.get_map().values()]:
            _end(waiting, key, Reach(answers=False, tried=f"no answer within {deadline_s:g} s"), found)
    return found


def own_address_towards(host: str, port: str) -> str:
    """The address of this host from which another one is reached; empty for this host itself, or if unknown."""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            # Of a datagram socket this sends nothing: the kernel chooses the way.
            towards.connect(there)
            here = str(towards.getsockname()[0])
    except OSError:
        return ""
    return "" if here.startswith("127.") or here in ("::1", "0.0.0.0", "::") else here


def _begin(address: str, waiting: selectors.BaseSelector, found: dict[str, Reach]) -> None:
    tried = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    tried.setblocking(False)
    try:
        number = tried.connect_ex((address, _PORT))
    except OSError as error:
        number = error.errno or errno.EINVAL
    if number == errno.EINPROGRESS:
        waiting.register(tried, selectors.EVENT_WRITE, address)
    else:
        tried.close()
        found[address] = _outcome(number)


def _end(waiting: selectors.BaseSelector, key: selectors.SelectorKey, reach: Reach, found: dict[str, Reach]) -> None:
    waiting.unregister(key.fileobj)
    key.fileobj.close()  # type: ignore[union-attr]
    found[key.data] = reach


def _outcome(number: int) -> Reach:
    if number == 0:
        return Reach(answers=True, tried="it accepted a connection")
    if number in (errno.ECONNREFUSED, errno.ECONNRESET):
        return Reach(answers=True, tried="it refused a connection, so its kernel runs")
    own = ", so this host's own link may be down" if number in _OWN_LINK else ""
    return Reach(answers=False if number in _NO_ANSWER else None, tried=os.strerror(number).lower() + own)


def try_addresses(job: JobFacts, here: str) -> tuple[TriedAddress, ...]:
    """Tries the other hosts of a job at the addresses that their back ends use, for 3.5 s in all.

    Nothing is tried of a job on one host, nor unless all ranks have answered and wait for one another.

    Args:
        job: The facts of all ranks that answered.
        here: Name of this host.
    """
    if job.incident.kind not in _STANDSTILLS or job.silent or not all(map(_waits, job.ranks)):
        return ()
    own = {address for facts in job.ranks if facts.host == here for address in _address(facts.machine.interface)}
    others = {
        facts.host: address
        for facts in job.ranks
        if facts.host not in ("", here)
        for address in _address(facts.machine.interface)
        if address not in own
    }
    chosen = dict([*others.items()][:_MOST])
    found = or_none(lambda: reach(chosen.values(), deadline_s=_DEADLINE_S)) or {} if chosen else {}
    return tuple(
        TriedAddress(
            host=host, address=address, answers=found[address].answers, seen_from=here, tried=found[address].tried
        )
        for host, address in chosen.items()
        if address in found
    )


def _waits(facts: RankFacts) -> bool:
    return facts.exception is None and activity(facts).waits_for_peers


def _address(interface: InterfaceFacts | None) -> list[str]:
    return [interface.address] if interface is not None and interface.address and not interface.is_loopback else []
