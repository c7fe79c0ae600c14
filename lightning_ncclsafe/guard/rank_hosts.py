"""Where all ranks run, whether their hosts answer on the network, and whether they reach each other's back ends.

Each rank announces its host when it joins, and all keep the list for when a host cannot be reached.
"""

import errno
import json
import os
import selectors
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from lightning_ncclsafe.exchange import Exchange, ExchangeError, in_parts
from lightning_ncclsafe.facts import IncidentKind, InterfaceFacts, JobFacts, RankFacts, SilentHost, TriedAddress
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.rules.kit.activity import activity

_KEY = "where"
# In a larger job it would take the store some seconds to serve the list to every rank: one rank of each host reads it,
# and so do the first ranks, of which the lowest that answers will report.
_ALL_KEEP = 2048
_ONE_IN = 8

# Any port would do: a host that runs refuses a connection that nothing listens for. This one is rarely filtered.
_PORT = 22
_OWN_LINK = (errno.ENETUNREACH, errno.ENETDOWN)
_NO_ANSWER = (*_OWN_LINK, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)

# Of a larger job the first hosts are tried: a cut that matters is mostly that of one host, or of this one.
_MOST = 64
# The kernel needs 3 s to find that no host has an address of its own network.
_DEADLINE_S = 3.5
_STALLS = (IncidentKind.SUSPECT, IncidentKind.TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionAttempt:
    """The outcome of an attempt to connect to a host.

    Attributes:
        answers: Whether the host itself answered; None if unknown.
        tried: The outcome, in words.
    """

    answers: bool | None
    tried: str


# A host whose address is unknown.
_UNTRIED = ConnectionAttempt(answers=None, tried="")


class RankHosts:
    """Knows on which host each rank runs. Belongs to the watchdog's thread, but for :meth:`announce`.

    Rank 0 collects and announces, so that not every rank asks the store for every rank.

    Args:
        launch: What started the job, equal for all its starts; see :class:`~lightning_ncclsafe.facts.JobFacts`.
    """

    def __init__(self, *, rank: int, world_size: int, host: str, launch: str = "") -> None:
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._launch = launch
        self._hosts: dict[int, tuple[str, str]] = {}
        keeps = world_size <= _ALL_KEEP or rank < _ONE_IN or rank % _ONE_IN == 0
        self._is_known = world_size == 1 or not keeps

    def announce(self, exchange: Exchange, address: str) -> None:
        """Announces where this rank runs.

        Args:
            address: Address of this host, as other hosts may reach it; empty if unknown.
        """
        exchange.set(f"{_KEY}/{self._rank}", json.dumps([self._host, address]).encode())

    def meet(self, exchange: Exchange) -> None:
        """Reads what the others have announced, until all have."""
        if self._is_known:
            return
        with suppress(ExchangeError):
            if self._rank == 0:
                self._collect(exchange)
            elif (found := exchange.get_many([_KEY]).get(_KEY)) is not None:
                self._hosts = {rank: (host, address) for rank, (host, address) in enumerate(json.loads(found))}
                self._is_known = True

    def complete(self, job: JobFacts) -> JobFacts:
        """Adds what only a try on the network shows.

        Hosts on which no rank answered are tried for 1 s in all. Where all ranks have answered and wait for one
        another, their hosts are tried at the addresses that their back ends use, for 3.5 s in all.
        """
        lost = _lost_hosts(job, self._hosts)
        addresses = {host: self._hosts[ranks[0]][1] for host, ranks in lost.items()}
        reached = {"": _UNTRIED, **try_connecting(filter(None, addresses.values()))}
        hosts = [
            SilentHost(
                host=host,
                ranks=ranks,
                address=addresses[host],
                answers=reached[addresses[host]].answers,
                seen_from=self._host,
                tried=reached[addresses[host]].tried,
            )
            for host, ranks in lost.items()
        ]
        return replace(job, silent_hosts=tuple(hosts), tried=_tried(job, self._host), launch=self._launch)

    def _collect(self, exchange: Exchange) -> None:
        for part in in_parts(f"{_KEY}/{rank}" for rank in range(self._world_size) if rank not in self._hosts):
            for key, found in exchange.get_many(part).items():
                host, address = json.loads(found)
                self._hosts[int(key.rpartition("/")[2])] = host, address
        if len(self._hosts) == self._world_size:
            exchange.set(_KEY, json.dumps([self._hosts[rank] for rank in range(self._world_size)]).encode())
            self._is_known = True


def _lost_hosts(job: JobFacts, hosts: dict[int, tuple[str, str]]) -> dict[str, tuple[int, ...]]:
    """The ranks of each host on which none answered or was seen."""
    heard = {*(facts.rank for facts in job.ranks), *(process.rank for process in job.witnessed)}
    heard |= {peer.rank for facts in job.ranks for peer in facts.peers}
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, (host, _) in sorted(hosts.items()):
        ranks[host].append(rank)
    return {host: tuple(there) for host, there in ranks.items() if heard.isdisjoint(there)}


def try_connecting(addresses: Iterable[str], *, deadline_s: float = 1.0) -> dict[str, ConnectionAttempt]:
    """Tries to connect to each of these addresses, to all at the same time.

    Args:
        addresses: IPv4 or IPv6 addresses.
        deadline_s: Seconds that they have in all.

    Returns:
        The outcomes, by address.
    """
    found: dict[str, ConnectionAttempt] = {}
    with selectors.DefaultSelector() as waiting:
        for address in dict.fromkeys(addresses):
            _begin(address, waiting, found)
        give_up = time.monotonic() + deadline_s
        while waiting.get_map() and (left_s := give_up - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                _end(waiting, key, _outcome(key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)), found)  # type: ignore[union-attr]
        for key in [*waiting.get_map().values()]:
            _end(waiting, key, ConnectionAttempt(answers=False, tried=f"no answer within {deadline_s:g} s"), found)
    return found


def _begin(address: str, waiting: selectors.BaseSelector, found: dict[str, ConnectionAttempt]) -> None:
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


def _end(
    waiting: selectors.BaseSelector,
    key: selectors.SelectorKey,
    attempt: ConnectionAttempt,
    found: dict[str, ConnectionAttempt],
) -> None:
    waiting.unregister(key.fileobj)
    key.fileobj.close()  # type: ignore[union-attr]
    found[key.data] = attempt


def _outcome(number: int) -> ConnectionAttempt:
    if number == 0:
        return ConnectionAttempt(answers=True, tried="it accepted a connection")
    if number in (errno.ECONNREFUSED, errno.ECONNRESET):
        return ConnectionAttempt(answers=True, tried="it refused a connection, so its kernel runs")
    own = ", so this host's own link may be down" if number in _OWN_LINK else ""
    return ConnectionAttempt(answers=False if number in _NO_ANSWER else None, tried=os.strerror(number).lower() + own)


def _tried(job: JobFacts, here: str) -> tuple[TriedAddress, ...]:
    """The outcomes for the addresses that the other hosts' back ends use."""
    if job.incident.kind not in _STALLS or job.silent or not all(map(_waits, job.ranks)):
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
    found = or_none(lambda: try_connecting(chosen.values(), deadline_s=_DEADLINE_S)) or {} if chosen else {}
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
