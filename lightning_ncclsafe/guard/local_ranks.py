"""The other ranks of this host: known by the cards that they leave, and before that by their processes.

In a later call of the Trainer they are known from the one before.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts import codec
from lightning_ncclsafe.probes.host import resources
from lightning_ncclsafe.probes.rank import Card, RankProbe, card_key

# Ranks that are started together come within about this time, and need not be looked for.
_PATIENCE_S = 2.0
# Between two looks; more on a host of so many processes that a search among them takes long.
_LOOK_S = 2.0
_SEARCH_SHARE = 0.05
# Longer than a search takes among some thousand processes. Of one that is stuck on storage, the kernel may not say
# what is in its environment before it is stuck no more.
_SEARCH_S = 2.0
# A process that is gone in one look may have been replaced before the next, by what has started it.
_LOOKS_UNTIL_LOST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank of which job this is.

    Attributes:
        rank: Global rank.
        local_rank: Rank on this host.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this host.
        master_port: ``MASTER_PORT`` of the job.
        master_address: ``MASTER_ADDR`` of the job.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_port: str = ""
    master_address: str = ""


class LocalRanks:
    """Finds the ranks of this host for the probe. Belongs to the watchdog's thread.

    Args:
        place: Which rank this is.
        probe: Looks at them.
        find: Finds ranks by their environment: process ids by local ranks.
        clock: Seconds that only grow; for tests.
        met: The cards of the last call of the Trainer in this process, by rank; those of this one take their place.

    Attributes:
        has_lost: Whether the process of a rank has ended before the ranks met, and no other has taken its place.
    """

    def __init__(
        self,
        place: Place,
        probe: RankProbe,
        *,
        find: Callable[[str], dict[int, int]] = resources.find_ranks,
        clock: Callable[[], float] = time.monotonic,
        met: dict[int, Card] | None = None,
    ) -> None:
        self._place = place
        self._probe = probe
        self._find = find
        self._clock = clock
        self._search = SideThread("ncclsafe-search")
        self._found: dict[int, int] = {}
        self._met = met if met is not None else {}
        # They may not have come to this call yet, and then no guard of theirs would answer.
        self._early: dict[int, Card] = {rank: replace(card, has_guard=False) for rank, card in self._met.items()}
        self._gone: dict[int, int] = {}
        self._next_look_s = 0.0
        self._have_met = place.local_world_size == 1
        self.has_lost = False
        if self._early:
            self._probe.peers = tuple(self._early.values())

    def meet(self, exchange: Exchange) -> None:
        """Reads their cards, once they are all there: later the store may be gone."""
        self.has_lost = False
        if self._have_met:
            return
        first, count = self._place.rank - self._place.local_rank, self._place.local_world_size
        keys = [card_key(rank) for rank in range(first, first + count) if rank != self._place.rank]
        with suppress(ExchangeError):
            cards = [codec.decode(Card, card) for card in exchange.get_many(keys).values()]
            if len(cards) == len(keys):
                self._have_met = True
                self._probe.peers = tuple(card for card in cards if card.host == self._probe.card.host)
                self._met.clear()
                self._met.update({card.rank: card for card in self._probe.peers})

    def look_around(self, idle_s: float) -> None:
        """Looks every 2 s at the ranks that have not joined, while this rank waits for them.

        Args:
            idle_s: Seconds since this rank last made progress.
        """
        if self._have_met or idle_s < _PATIENCE_S or self._clock() < self._next_look_s:
            return
        began_s = self._clock()
        # What a host does not let this process see is no reason to go without a guard.
        with suppress(psutil.Error, OSError):
            self._look()
        ended_s = self._clock()
        self._next_look_s = ended_s + max(_LOOK_S, (ended_s - began_s) / _SEARCH_SHARE)

    def _look(self) -> None:
        if len(self._early) < self._place.local_world_size - 1 or self._gone:
            self.search()
        for rank, card in self._early.items():
            is_gone = self._probe.look_at_peer(card).state in resources.ENDED
            self._gone[rank] = self._gone.get(rank, 0) + 1 if is_gone else 0
        self._gone = {rank: looks for rank, looks in self._gone.items() if looks}
        self.has_lost = any(looks >= _LOOKS_UNTIL_LOST for looks in self._gone.values())

    def search(self) -> None:
        """Finds the processes of ranks of this host that have not come far enough to leave a card."""
        if self._have_met:
            return
        first, own = self._place.rank - self._place.local_rank, self._place.local_rank
        for local_rank, pid in self._find_in_time().items():
            if local_rank != own and local_rank < self._place.local_world_size:
                self._know(first + local_rank, pid)
        self._probe.peers = tuple(self._early[rank] for rank in sorted(self._early))

    def _find_in_time(self) -> dict[int, int]:
        """What the last search has found that has ended; until one does, no other is begun."""

        def search() -> None:
            self._found = self._find(self._place.master_port)

        with suppress(UnansweredError):
            self._search.call(search, _SEARCH_S)
        return self._found

    def _know(self, rank: int, pid: int) -> None:
        if rank not in self._early or self._early[rank].pid != pid:
            with suppress(psutil.Error):
                started = psutil.Process(pid).create_time()
                here = self._probe.card.host
                self._early[rank] = Card(rank=rank, host=here, pid=pid, started=started, has_guard=False)
