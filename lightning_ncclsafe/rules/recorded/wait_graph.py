"""The wait-for graph of a job, from its dumps: who waits for whom, where that ends, and why.

In each group, a rank waits for the members that have not called its oldest open collective, or whose devices have older
work to complete; in a send or receive, it waits for a peer that has not called the other side. A chain of waits ends at
a root. All other ranks wait for ranks that wait, and cause nothing:

* A rank with nothing outstanding: its host does not call (``HOST``).
* A rank on which a collective is open that has ended on another member. No device ends one before all have begun it, so
  this rank's device makes no progress or does not answer (``DEVICE``), whomever the rank waits for.
* A circle: these calls cannot complete together (``ORDER``, or ``UNMATCHED`` if a send or receive has no other side).
* A collective that all members have called, or a send and its receive, that does not complete (``JOINED``).
* A rank of which nothing was read (``UNREAD``).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lightning_ncclsafe.facts import Collective, Group, JobFacts
from lightning_ncclsafe.rules.kit import Timeline, numel, once, other_end, signature
from lightning_ncclsafe.rules.recorded.calls import Calls, Op, Seen, has_dumps, waits_for_all
from lightning_ncclsafe.rules.recorded.circles import Node, components, ranks_before, ranks_in_circles


class RootCause(str, Enum):
    """Why waiting ends there."""

    HOST = "host"
    DEVICE = "device"
    ORDER = "order"
    UNMATCHED = "unmatched"
    JOINED = "joined"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Where waiting ends.

    Attributes:
        cause: The reason.
        ranks: The ranks that are the cause, ascending; all members if all have called the same.
        held: Ranks that wait for it, also by way of others, ascending.
        ops: The collectives in which these wait there, by group and number; those of most ranks first.
        circle: All ranks of a circle.
        is_sure: Whether this is known, and not only inferred.
    """

    cause: RootCause
    ranks: tuple[int, ...]
    held: tuple[int, ...] = ()
    ops: tuple[Op, ...] = ()
    circle: tuple[int, ...] = ()
    is_sure: bool = True


_MISSED = (Seen.ABSENT, Seen.UNREAD, Seen.UNKNOWN)


def has_moved(job: JobFacts) -> bool:
    """Whether the job still moved when it was dumped.

    A quarter of the dumps are older than others, or something had just ended on half of the ranks.
    """
    if len(job.outdated) > 1 and len(job.outdated) * 4 >= job.world_size:
        return True
    moving = [facts.record.is_moving for facts in job.ranks if facts.record is not None and facts.record.has_dump]
    return 2 * sum(moving) >= max(len(moving), 1)


@once
def roots(view: Timeline) -> tuple[Root, ...]:
    """The roots of a job of which dumps were read; those for which most ranks wait first."""
    return tuple(_WaitGraph(view).roots()) if has_dumps(view.job) and not has_moved(view.job) else ()


def roots_of(view: Timeline, cause: RootCause) -> list[Root]:
    """The roots of one kind, without those in groups whose members are unknown, because no dump has their counters."""
    known = view.groups_by_name
    return [root for root in roots(view) if root.cause is cause and all(name in known for name, _ in root.ops)]


class _WaitGraph(Calls):
    """The graph. Its nodes are ranks, and collectives in which ranks wait.

    Attributes:
        edges: What each node waits for, and what is known about the call that is missing there.
        unmatched: Pairs of a rank that waits in a send or receive and a peer that has called no other side of its size.
        moved: Whether the dumps contradict each other, as those of a job that still moves.
    """

    def __init__(self, view: Timeline) -> None:
        super().__init__(view)
        self.edges: dict[Node, dict[Node, Seen]] = defaultdict(dict)
        self.unmatched: set[tuple[int, int]] = set()
        self.moved = False

    def frozen(self) -> dict[int, list[Op]]:
        """Ranks with open collectives that have ended on other members, and these collectives."""
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
        return found

    def roots(self) -> Iterator[Root]:
        frozen = self.frozen()
        if self.moved or (frozen and self.view.job.outdated):
            return
        for rank in self.open:
            if rank not in frozen:
                self._wait(rank)
        parts = list(components(self.edges))
        home = {node: number for number, nodes in enumerate(parts) for node in nodes}
        ends = [
            number
            for number, nodes in enumerate(parts)
            if all(home[other] == number for node in nodes for other in self.edges.get(node, ()))
        ]
        before: dict[Node, list[Node]] = defaultdict(list)
        for node, others in self.edges.items():
            for other in others:
                before[other].append(node)
        found = [root for number in ends for root in self._root(parts[number], frozen, before)]
        if not any(root.cause is not RootCause.JOINED for root in found):
            found = [self._frozen(rank, ops, ()) for rank, ops in frozen.items()] or found
        if not self._are_of_moments(found):
            yield from _ranked(found)

    def _are_of_moments(self, found: list[Root]) -> bool:
        """Whether most ranks seem at fault, by hosts and devices: a moving job, dumped at different moments."""
        at_fault = [
            {rank for root in found if root.cause is cause for rank in root.ranks}
            for cause in (RootCause.HOST, RootCause.DEVICE)
        ]
        return all(at_fault) and 2 * len(set().union(*at_fault)) > len(self.open)

    def _frozen(self, rank: int, ops: list[Op], held: tuple[int, ...]) -> Root:
        sure = not ops or any(
            self.has_surely_ended(other, op) for op in ops for other in self.members.get(op[0], ()) if other != rank
        )
        sure = sure and not (self._is_overtaken(rank) or self._is_of_another_moment(rank) or self._do_several_move)
        if not ops:
            # Its sends and receives were counted against those of its peer.
            sure = sure and self.lost.isdisjoint({rank, *self.passed_by(rank)})
        return Root(cause=RootCause.DEVICE, ranks=(rank,), held=held, ops=tuple(ops), is_sure=sure)

    def _is_of_another_moment(self, rank: int) -> bool:
        """Whether its dump may be older: something had just ended, or its calls were long before those of others."""
        record = self.view.facts[rank].record
        return record is not None and (record.is_moving or record.is_doubtful)

    @cached_property
    def _do_several_move(self) -> bool:
        """Whether something had just ended on several ranks: once a device has failed, all ranks wait."""
        records = (facts.record for facts in self.view.facts.values())
        return sum(record is not None and record.is_moving for record in records) > 1

    def _is_overtaken(self, rank: int) -> bool:
        """Whether others have completed what this rank has not called, so that its dump may be older."""
        return any(
            group.last_enqueued < theirs.last_completed
            for name, group in self.groups[rank].items()
            for other in self.members.get(name, ())
            if (theirs := self.groups.get(other, {}).get(name)) is not None and not (group.is_mixed or theirs.is_mixed)
        )

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
        for (name, kind, peer), call in self.ends[rank].items():
            seen = self._seen_of_peer(rank, peer, (name, "recv" if kind == "send" else "send", rank), call)
            if seen is not None:
                self.edges[rank].setdefault(peer, seen)

    def _seen_of_peer(self, rank: int, peer: int, side: tuple[str, str, int], call: Collective) -> Seen | None:
        """Why a send or receive waits for its peer; None if both sides are there."""
        self.edges.setdefault(rank, {})
        if peer not in self.ends or self.seen(peer, ("", 0)) is Seen.UNREAD:
            return Seen.UNREAD
        known, numbered = self.other_side(rank, call)
        other = numbered if known is not Seen.UNKNOWN else self.ends[peer].get(side)
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

    def _root(
        self, nodes: list[Node], frozen: Mapping[int, list[Op]], before: Mapping[Node, list[Node]]
    ) -> Iterator[Root]:
        ranks = tuple(sorted(node for node in nodes if isinstance(node, int)))
        ops = [node for node in nodes if isinstance(node, tuple)]
        held = tuple(sorted(rank for rank in ranks_before(nodes, before) if rank not in ranks))
        if not ranks:
            yield from self._joined(ops[0], held)
        elif len(nodes) == 1:
            yield from self._alone(ranks[0], held, frozen, before)
        else:
            yield self._circle(ranks, ops, held)

    def _alone(
        self, rank: int, held: tuple[int, ...], frozen: Mapping[int, list[Op]], before: Mapping[Node, list[Node]]
    ) -> Iterator[Root]:
        ops = sorted((node for node in before.get(rank, ()) if isinstance(node, tuple)), key=self._most)
        seen = [self.edges[node][rank] for node in before.get(rank, ())]
        if rank in frozen:
            yield self._frozen(rank, frozen[rank], held)
        elif Seen.UNREAD in seen:
            yield Root(cause=RootCause.UNREAD, ranks=(rank,), held=held, ops=tuple(ops))
        elif Seen.OPEN in seen:
            # Its device has not reached what others' have started.
            sure = rank not in self.lost
            yield Root(cause=RootCause.DEVICE, ranks=(rank,), held=held, ops=tuple(ops), is_sure=sure)
        elif self.open.get(rank) and (peer := self._is_with(rank)) is not None:
            if rank < peer or self.edges.get(peer):
                yield Root(cause=RootCause.JOINED, ranks=tuple(sorted((rank, peer))), held=held, is_sure=False)
        elif seen and not self.open[rank]:
            yield self._idle(rank, held, tuple(ops), is_absent=Seen.ABSENT in seen)

    def _idle(self, rank: int, held: tuple[int, ...], ops: tuple[Op, ...], *, is_absent: bool) -> Root:
        """The root of a rank with nothing outstanding for which others wait."""
        lost = self._asked_wrongly(rank, held)
        if lost or self._has_passed(rank, held):
            ranks = tuple(sorted((rank, *(lost or held))))
            return Root(cause=RootCause.UNMATCHED, ranks=ranks, circle=ranks, is_sure=self.lost.isdisjoint(ranks))
        # If a job is dumped at its beginning, some ranks have called nothing yet.
        record = self.view.facts[rank].record
        is_blank = record is not None and record.is_blank
        is_sure = not is_blank and is_absent and len(held) * 2 >= len(self.open) - len(held)
        # It may have reached the end of the program together with other idle ranks.
        is_known = bool(ops) or bool(self.view.silent) or not self._is_level_with_idle(rank)
        is_sure = is_sure and is_known and not self._is_of_another_moment(rank)
        return Root(cause=RootCause.HOST, ranks=(rank,), held=held, ops=ops, is_sure=is_sure)

    def _is_level_with_idle(self, rank: int) -> bool:
        """Whether another member of a group has nothing outstanding, either, and nobody waits for it."""
        awaited = {node for edges in self.edges.values() for node in edges}
        return any(
            other != rank and other not in awaited and other in self.open and self.is_idle(other)
            for name, group in self.groups[rank].items()
            if group.last_enqueued and not group.is_mixed
            for other in self.members.get(name, ())
        )

    def _is_with(self, rank: int) -> int | None:
        """The peer with which a rank is in a send or receive that both have reached."""
        first = self.open[rank][0]
        end = other_end(first, self.members.get(first.group, ())) if first.is_p2p else None
        if end is None or end[1] not in self.ends:
            return None
        other = self.ends[end[1]].get((first.group, "recv" if end[0] == "send" else "send", rank))
        return end[1] if other is not None and self.is_head(end[1], other) else None

    def _has_passed(self, rank: int, held: tuple[int, ...]) -> bool:
        """Whether a rank for which only one other waits, in a send or receive, has continued past it.

        Both have completed a collective that was called later, or all others have reached their end as well.
        """
        waiting = held[0] if len(held) == 1 else -1
        if (waiting, rank) not in self.unmatched or not self.open[waiting][0].is_p2p:
            return False
        calls = self.view.facts[waiting].collectives
        later = calls[calls.index(self.open[waiting][0]) :]
        together = (c for c in later if c.completed and not c.is_p2p and waits_for_all(c))
        others = [other for other in self.open if other not in (rank, waiting)]
        return any(rank in self.members.get(call.group, ()) for call in together) or (
            len(others) > 0 and all(self.is_idle(other) for other in others)
        )

    def _asked_wrongly(self, rank: int, held: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that wait for a rank, if all of them have exchanged data with others, but never with this rank."""
        waiting = tuple(one for one in held if rank in self.edges.get(one, ()))
        is_alone = not any(rank in edges for node, edges in self.edges.items() if not isinstance(node, int))
        known = self._has_exchanged_with(rank)
        are_strangers = all(
            known and (theirs := self._has_exchanged_with(one)) and rank not in theirs for one in waiting
        )
        return waiting if is_alone and are_strangers and known.isdisjoint(waiting) else ()

    def _has_exchanged_with(self, rank: int) -> set[int]:
        calls = (call for call in self.view.facts[rank].collectives if call.is_p2p and call.completed)
        ends = (other_end(call, self.members.get(call.group, ())) for call in calls)
        return {end[1] for end in ends if end is not None}

    def _most(self, op: Op) -> tuple[int, str, int]:
        return (-len(self.calls[op]), *op)

    def _joined(self, op: Op, held: tuple[int, ...]) -> Iterator[Root]:
        called = self.calls[op]
        if len({signature(call) for call in called.values()}) > 1:
            return
        sure = self.lost.isdisjoint(called)
        yield Root(cause=RootCause.JOINED, ranks=tuple(sorted(called)), held=held, ops=(op,), is_sure=sure)

    def _circle(self, ranks: tuple[int, ...], ops: list[Op], held: tuple[int, ...]) -> Root:
        core = self._core(ranks)
        held = tuple(sorted({*held, *ranks} - set(core)))
        ranks, inside = core, set(core)
        pairs = [(one, other) for one, other in self.unmatched if one in inside and other in inside]
        # Or one side is in a send or receive whose other side comes after a call that the first has not reached.
        pairs = pairs or [(one, other) for one in ranks for other in ranks if self._waits_with(one, other)]
        if pairs:
            at_first = [(one, other) for one, other in pairs if self._waits_with(one, other)]
            named = (
                ranks_in_circles(at_first)
                or ranks_in_circles(pairs)
                or {rank for pair in at_first or pairs for rank in pair}
            )
            both = tuple(sorted(named))
            # Of several pairs, any may not match; a rank that is in all of them has called too much or too little.
            waits = {frozenset((one, other)) for one in ranks for other in self.edges.get(one, ()) if other in inside}
            common = tuple(frozenset.intersection(*waits)) if len(waits) > 1 else ()
            sure = (len(waits) == 1 or len(common) == 1) and self.lost.isdisjoint(ranks)
            who = common if len(common) == 1 else both
            return Root(cause=RootCause.UNMATCHED, ranks=who, held=held, ops=tuple(ops), circle=both, is_sure=sure)
        ops = sorted(ops, key=self._most)
        first = [self.open[rank][0] for rank in ranks]
        own = {(call.group, call.seq) for call in first if not call.is_p2p}
        ops = [op for op in ops if op in own] or ops
        odd, sure = self._odd_ones(ranks, ops), self.lost.isdisjoint(ranks)
        return Root(cause=RootCause.ORDER, ranks=odd, held=held, ops=tuple(ops), circle=ranks, is_sure=sure)

    def _core(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks whose devices' first open calls form a circle; all others wait behind something older."""
        edges: dict[Node, dict[Node, Seen]] = {rank: dict.fromkeys(self._held_up_by(rank), Seen.OPEN) for rank in ranks}
        inside = set(ranks)
        found: set[int] = set()
        for nodes in components(edges):
            goes_on = any(other in inside and other not in nodes for node in nodes for other in edges.get(node, ()))
            if len(nodes) > 1 and not goes_on:
                found |= {node for node in nodes if isinstance(node, int)}
        return tuple(sorted(found)) or ranks

    def _held_up_by(self, rank: int) -> Iterator[int]:
        """The ranks for which a rank's oldest open call waits."""
        first = self.open[rank][0]
        if not first.is_p2p:
            around = self.edges.get((first.group, first.seq), ())
            yield from (node for node in around if isinstance(node, int) and node != rank)
        for (name, kind, peer), call in self.ends[rank].items():
            if call.is_p2p and first.is_p2p and (name, call.seq) == (first.group, first.seq):
                other = self.ends.get(peer, {}).get((name, "recv" if kind == "send" else "send", rank))
                if other is None or not self.is_head(peer, other) or numel(call) != numel(other):
                    yield peer

    def _waits_with(self, rank: int, peer: int) -> bool:
        """Whether a rank's oldest open call is a send or receive with a peer."""
        first = self.open[rank][0]
        end = other_end(first, self.members.get(first.group, ())) if first.is_p2p else None
        return end is not None and end[1] == peer

    def _odd_ones(self, circle: tuple[int, ...], ops: list[Op]) -> tuple[int, ...]:
        """The ranks of a circle that use a different order from most; all of them if there is no majority.

        Ranks in other groups of the same kinds count, too.
        """
        orders = {rank: order for rank in self.view.facts if (order := self._order(rank, ops))}
        counts = Counter(orders.values()).most_common()
        if len(counts) < 2 or counts[0][1] == counts[1][1]:
            return circle
        odd = tuple(rank for rank in circle if orders.get(rank, counts[0][0]) != counts[0][0])
        return odd or circle

    def _order(self, rank: int, ops: list[Op]) -> tuple[str, ...]:
        """The order in which a rank has called the first two kinds of group, at these numbers; empty if unknown."""
        about = {group.name: group.description for group in self._described}
        kinds = list({about.get(name, name): (name, seq) for name, seq in reversed(ops)}.items())[::-1][:2]
        if len(kinds) < 2:
            return ()
        places: list[tuple[float, str]] = []
        for kind, (_, seq) in kinds:
            own = [name for name in self.groups[rank] if about.get(name, name) == kind]
            place = self._place(rank, (own[0], seq)) if len(own) == 1 else None
            if place is None:
                return ()
            places.append((place, kind))
        if places[0][0] == places[1][0]:
            return ()
        return tuple(kind for _, kind in sorted(places))

    def _place(self, rank: int, op: Op) -> float | None:
        """The place in a rank's order of calls: ended before open, and open before uncalled."""
        seen = self.seen(rank, op)
        if seen is Seen.OPEN:
            return float(self.open[rank].index(self.calls[op][rank]))
        return {Seen.ENDED: -1.0, Seen.ABSENT: math.inf}.get(seen)

    @cached_property
    def _described(self) -> list[Group]:
        return [group for groups in self.groups.values() for group in groups.values() if group.description]


def _ranked(found: list[Root]) -> list[Root]:
    """Sorts the roots; roots that a known culprit may explain are left out."""
    known = [root for root in found if root.cause in (RootCause.HOST, RootCause.DEVICE) and root.is_sure]
    circles = [
        root for root in found if root.cause in (RootCause.ORDER, RootCause.UNMATCHED) and (root.is_sure or not known)
    ]
    if known or circles:
        explained = {rank for root in (*known, *circles) for rank in root.held}
        unread = [root for root in found if root.cause is RootCause.UNREAD and not explained.issuperset(root.held)]
        found = [*known, *circles, *unread]
    return sorted(found, key=lambda root: -len(root.held))
