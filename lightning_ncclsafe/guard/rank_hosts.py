"""Where all ranks run: each announces it when it joins, and all keep it for when a host cannot be reached."""

import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace

from lightning_ncclsafe.exchange import Exchange, ExchangeError, in_parts
from lightning_ncclsafe.facts import JobFacts, SilentHost
from lightning_ncclsafe.probes.network.reach import reach

_KEY = "where"
# In a larger job it would take the store some seconds to serve the list to every rank: one rank of each host reads it,
# and so do the first ranks, of which the lowest that answers will report.
_ALL_KEEP = 2048
_ONE_IN = 8


class RankHosts:
    """Knows on which host each rank runs. Belongs to the watchdog's thread, but for :meth:`announce`.

    Rank 0 collects and announces, so that not every rank asks the store for every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        host: Name of this host.
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
            exchange: What the ranks share.
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
                self._keep(found)

    def complete(self, job: JobFacts) -> JobFacts:
        """Adds the hosts on which no rank answered: each is tried on the network, for 1 s in all."""
        lost = _lost_hosts(job, self._hosts)
        reached = reach(address for host in lost if (address := self._hosts[lost[host][0]][1]))
        hosts = []
        for host, ranks in lost.items():
            address = self._hosts[ranks[0]][1]
            outcome = reached.get(address)
            hosts.append(
                SilentHost(
                    host=host,
                    ranks=ranks,
                    address=address,
                    answers=outcome.answers if outcome is not None else None,
                    seen_from=self._host,
                    tried=outcome.tried if outcome is not None else "",
                )
            )
        return replace(job, silent_hosts=tuple(hosts), launch=self._launch)

    def _collect(self, exchange: Exchange) -> None:
        for part in in_parts(f"{_KEY}/{rank}" for rank in range(self._world_size) if rank not in self._hosts):
            for key, found in exchange.get_many(part).items():
                host, address = json.loads(found)
                self._hosts[int(key.rpartition("/")[2])] = host, address
        if len(self._hosts) == self._world_size:
            exchange.set(_KEY, json.dumps([self._hosts[rank] for rank in range(self._world_size)]).encode())
            self._is_known = True

    def _keep(self, found: bytes) -> None:
        self._hosts = {rank: (host, address) for rank, (host, address) in enumerate(json.loads(found))}
        self._is_known = True


def _lost_hosts(job: JobFacts, hosts: dict[int, tuple[str, str]]) -> dict[str, tuple[int, ...]]:
    """The ranks of each host on which none answered or was seen."""
    heard = {*(facts.rank for facts in job.ranks), *(process.rank for process in job.witnessed)}
    heard |= {peer.rank for facts in job.ranks for peer in facts.peers}
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, (host, _) in sorted(hosts.items()):
        ranks[host].append(rank)
    return {host: tuple(there) for host, there in ranks.items() if heard.isdisjoint(there)}
