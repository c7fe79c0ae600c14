"""The wait-for graph of a job, from its dumps: who waits for whom.

In each group, a rank waits for the members that have not called its oldest open collective, or whose devices have older
work to complete; in a send or receive, it waits for a peer that has not called the other side. A rank waits for nobody
if a collective is open on it that has ended on another member: no device ends one before all have begun it, so this
rank's device makes no progress, or does not answer.
"""

from collections import defaultdict
from collections.abc import Iterable

from lightning_ncclsafe.facts import Collective
from lightning_ncclsafe.rules.kit import Timeline, numel
from lightning_ncclsafe.rules.recorded.calls import Calls, Op, Seen, waits_for_all
from lightning_ncclsafe.rules.recorded.circles import Node

_MISSED = (Seen.ABSENT, Seen.UNREAD, Seen.UNKNOWN)


class WaitGraph(Calls):
    """The graph. Its nodes are ranks, and collectives in which ranks wait.

    Attributes:
        edges: What each node waits for, and what is known about the call that is missing there.
        unmatched: Pairs of a rank that waits in a send or receive and a peer that has called no other side of its size.
        frozen: Ranks with open collectives that have ended on other members, and these collectives.
        moved: Whether the dumps contradict each other, as those of a job that still moves; nobody waits then.
    """

    def __init__(self, view: Timeline) -> None:
        super().__init__(view)
        self.edges: dict[Node, dict[Node, Seen]] = defaultdict(dict)
        self.unmatched: set[tuple[int, int]] = set()
        self.moved = False
        self.frozen = self._frozen()
        for rank in () if self.moved else self.open:
            if rank not in self.frozen:
                self._wait(rank)

    def _frozen(self) -> dict[int, list[Op]]:
        through: dict[Op, list[int]] = {}
        found: dict[int, list[Op]] = defaultdict(list)
        for rank, waits in self.waits.items():
            for name, call in waits.items():
                if not waits_for_all(call) or call.launching:
                    continue
                op = (name, call.seq)
                if op not in through:
                    through[op] = [one for one in self.members.get(name, ()) if self.seen(one, op) is Seen.ENDED]
                if through[op]:
                    found[rank].append(op)
        ahead = {rank for ops in found.values() for op in ops for rank in through[op]}
        for rank in self.open:
            peers = self.passed_by(rank) if rank not in found else set()
            if peers:
                found[rank] = []
                ahead |= peers
        # A rank that is behind one rank and ahead of another one was dumped at another moment than these.
        self.moved = not ahead.isdisjoint(found)
        # A failed GPU is behind all others; if half of the ranks are behind, their dumps are of another moment.
        self.moved |= len(found) > 1 and 2 * len(found) >= len(self.open)
        # Beside outdated dumps, a rank that seems frozen may only have been dumped earlier.
        self.moved |= bool(found) and bool(self.view.job.outdated)
        return found

    def _wait(self, rank: int) -> None:
        """What a rank waits for: of each group the oldest collective, of each pair the oldest send and receive."""
        for name, call in self.waits[rank].items():
            op = (name, call.seq)
            if op not in self.edges:
                self._wait_in(op)
            # An older call holds up a later one, unless some ranks have not called the later one.
            is_missed = any(seen in _MISSED for seen in self.edges[op].values())
            if is_missed or (self.is_head(rank, call) and self.edges[op].get(rank) is None):
                self.edges[rank][op] = Seen.OPEN
        for (_, _, peer), call in self.ends[rank].items():
            seen = self._seen_of_peer(rank, peer, call)
            if seen is not None:
                self.edges[rank].setdefault(peer, seen)

    def _seen_of_peer(self, rank: int, peer: int, call: Collective) -> Seen | None:
        """Why a send or receive waits for its peer; None if both sides are there."""
        self.edges.setdefault(rank, {})
        if peer not in self.ends or self.seen(peer, ("", 0)) is Seen.UNREAD:
            return Seen.UNREAD
        known, numbered = self.other_side(rank, call)
        other = numbered if known is not Seen.UNKNOWN else self.facing(rank, call)
        if known is Seen.ENDED:
            return None
        if other is None:
            self.unmatched.add((rank, peer))
            return Seen.ABSENT
        if self.is_head(rank, call) and not self.is_head(peer, other):
            return Seen.CALLED
        if self.is_head(rank, call) and numel(call) != numel(other):
            # The sizes of the two sides differ.
            self.unmatched.add((rank, peer))
            return Seen.ABSENT
        return Seen.OPEN if call.started and not other.started and peer in self.timed else None

    def _wait_in(self, op: Op) -> None:
        """For whom a collective waits: ranks that have not called it, or whose devices have not reached it."""
        edges = self.edges[op]
        called = self.calls[op]
        started = {rank for rank, call in called.items() if call.started}
        for rank in self.members.get(op[0], ()):
            seen = self.seen(rank, op)
            if seen in _MISSED:
                edges[rank] = seen
            elif seen is Seen.OPEN and not self.is_head(rank, called[rank]):
                edges[rank] = Seen.CALLED
        if Seen.ABSENT in edges.values():
            # Ranks that have certainly not called it explain the wait.
            self.edges[op] = {node: seen for node, seen in edges.items() if seen is not Seen.UNKNOWN}
        elif started:
            edges.update(dict.fromkeys((called.keys() & self.timed) - started - edges.keys(), Seen.OPEN))

    def waits_with(self, rank: int) -> int | None:
        """The peer of a rank whose oldest open call is a send or receive; None if it is another call."""
        end = self.end_of(self.open[rank][0])
        return end[1] if end is not None else None

    def by_number_of_ranks(self, ops: Iterable[Op]) -> list[Op]:
        """These collectives, those in which most ranks wait first."""
        return sorted(ops, key=lambda op: (-len(self.calls[op]), *op))
