"""The other ranks of this host: known by the info that they publish, and before that by their processes.

In a later call of the Trainer, they are known from the call before.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import psutil

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts import ENDED, codec
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.probes.host import resources
from lightning_ncclsafe.probes.peers import Peers
from lightning_ncclsafe.probes.rank_info import RankInfo, info_key

# Ranks that are started together join within about this time; until then there is no search for them.
_PATIENCE_S = 2.0
# Between two looks; longer if a search takes long because the host has many processes.
_LOOK_S = 2.0
_SEARCH_SHARE = 0.05
# Longer than a search takes among some thousand processes. While a process is stuck on storage, the kernel may not give
# its environment.
_SEARCH_S = 2.0
# A process that is gone in one look may be restarted by its launcher before the next.
_LOOKS_UNTIL_LOST = 2


class LocalRanks:
    """Finds the ranks of this host for the probe. Belongs to the watchdog's thread.

    Args:
        peers: Receives them, and looks at them.
        host: Name of this host.
        find: Finds ranks by their environment: process ids by ranks.
        met: The ranks known from the last call of the Trainer in this process; updated with those of this call.

    Attributes:
        has_lost: Whether the process of a rank ended before the ranks met, and was not restarted.
    """

    def __init__(
        self,
        place: Place,
        peers: Peers,
        *,
        host: str,
        find: Callable[[str, range], dict[int, int]] = resources.find_ranks,
        clock: Callable[[], float] = time.monotonic,
        met: dict[int, RankInfo] | None = None,
    ) -> None:
        self._place = place
        self._peers = peers
        self._host = host
        self._find = find
        self._clock = clock
        self._search = SideThread("ncclsafe-search")
        self._found: dict[int, int] = {}
        self._met = met if met is not None else {}
        # They may not have reached this call yet, so that no guard of theirs would answer.
        self._early: dict[int, RankInfo] = {rank: replace(peer, has_guard=False) for rank, peer in self._met.items()}
        self._gone: dict[int, int] = {}
        self._next_look_s = 0.0
        self._have_met = threading.Event()
        if place.local_world_size == 1:
            self._have_met.set()
        self.has_lost = False
        if self._early:
            self._peers.known = tuple(self._early.values())

    def meet(self, exchange: Exchange) -> None:
        """Reads what they have published, once all have: later, the store may be gone."""
        self.has_lost = False
        if self._have_met.is_set():
            return
        keys = [info_key(rank) for rank in self._place.ranks_here if rank != self._place.rank]
        with suppress(ExchangeError):
            peers = [codec.decode(RankInfo, peer) for peer in exchange.get_many(keys).values()]
            if len(peers) == len(keys):
                self._peers.known = tuple(peer for peer in peers if peer.host == self._host)
                self._met.clear()
                self._met.update({peer.rank: peer for peer in self._peers.known})
                self._have_met.set()

    @marked(Mark.STORE)
    def wait_until_met(self, within_s: float) -> bool:
        """Waits, on any thread, until the ranks of this host know each other; False if they do not by then."""
        return self._have_met.wait(within_s)

    def look_around(self, idle_s: float) -> None:
        """Looks every 2 s at the ranks that have not joined, once this rank has been idle, waiting for them."""
        if self._have_met.is_set() or idle_s < _PATIENCE_S or self._clock() < self._next_look_s:
            return
        began_s = self._clock()
        # The guard works without what the host does not let this process see.
        with suppress(psutil.Error, OSError):
            self._look()
        ended_s = self._clock()
        self._next_look_s = ended_s + max(_LOOK_S, (ended_s - began_s) / _SEARCH_SHARE)

    def _look(self) -> None:
        if len(self._early) < self._place.local_world_size - 1 or self._gone:
            self.search()
        for rank, peer in self._early.items():
            is_gone = self._peers.look_at(peer).state in ENDED
            self._gone[rank] = self._gone.get(rank, 0) + 1 if is_gone else 0
        self._gone = {rank: looks for rank, looks in self._gone.items() if looks}
        self.has_lost = any(looks >= _LOOKS_UNTIL_LOST for looks in self._gone.values())

    def search(self) -> None:
        """Finds the processes of ranks of this host that have not published their info yet."""
        if self._have_met.is_set():
            return
        for rank, pid in self._find_in_time().items():
            if rank != self._place.rank and rank < self._place.world_size:
                self._know(rank, pid)
        self._peers.known = tuple(self._early[rank] for rank in sorted(self._early))

    def _find_in_time(self) -> dict[int, int]:
        """The result of the last completed search; a new search begins only when the one before has ended."""

        def search() -> None:
            self._found = self._find(self._place.master_port, self._place.ranks_here)

        with suppress(UnansweredError):
            self._search.call(search, _SEARCH_S)
        return self._found

    def _know(self, rank: int, pid: int) -> None:
        if rank not in self._early or self._early[rank].pid != pid:
            with suppress(psutil.Error):
                started = psutil.Process(pid).create_time()
                self._early[rank] = RankInfo(rank=rank, host=self._host, pid=pid, started=started, has_guard=False)
