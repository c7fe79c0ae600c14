"""Where waiting ends in the wait-for graph of a job, and why.

A chain of waits ends at a root. All other ranks wait for ranks that wait, and cause nothing:

* A rank with nothing outstanding: its host does not call (``HOST``).
* A rank on which a collective is open that has ended on another member: its device makes no progress or does not answer
  (``DEVICE``), whomever the rank waits for.
* A circle: these calls cannot complete together (``ORDER``, or ``UNMATCHED`` if a send or receive has no other side).
* A collective that all members have called, or a send and its receive, that does not complete (``JOINED``).
* A rank of which nothing was read (``UNREAD``).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lightning_ncclsafe.facts import Collective, Group
from lightning_ncclsafe.rules.kit import Timeline, numel, once, signature
from lightning_ncclsafe.rules.recorded.kit.calls import (
    OTHER_KIND,
    Calls,
    Op,
    Seen,
    has_dumps,
    has_moved,
    record_of,
    waits_for_all,
)

_Node = Hashable
"""A rank, or a collective in which ranks wait."""
_Edges = Mapping[_Node, Iterable[_Node]]
"""For each node, those that it waits for."""

_MISSED = (Seen.ABSENT, Seen.UNREAD, Seen.UNKNOWN)


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
        is_astray: Whether the ranks are in a send or receive with one that they have never exchanged data with.
        is_sure: Whether this is known, and not only inferred.
    """

    cause: RootCause
    ranks: tuple[int, ...]
    held: tuple[int, ...] = ()
    ops: tuple[Op, ...] = ()
    circle: tuple[int, ...] = ()
    is_astray: bool = False
    is_sure: bool = True


@once
def roots(view: Timeline) -> tuple[Root, ...]:
    """The roots of a job of which dumps were read; those for which most ranks wait first."""
    if not has_dumps(view.job) or has_moved(view.job):
        return ()
    graph = _WaitGraph(view)
    return () if graph.moved else tuple(_Roots(graph).found())


def roots_of(view: Timeline, cause: RootCause) -> list[Root]:
    """The roots of one kind, without those in groups whose members are unknown, because no dump has their counters."""
    known = view.groups_by_name
    return [root for root in roots(view) if root.cause is cause and all(name in known for name, _ in root.ops)]


class _WaitGraph(Calls):
    """The wait-for graph of a job, from its dumps: its nodes are ranks, and collectives in which ranks wait.

    In each group, a rank waits for the members that have not called its oldest open collective, or whose devices have
    older work to complete; in a send or receive, it waits for a peer that has not called the other side. A rank waits
    for nobody if a collective is open on it that has ended on another member: no device ends one before all have begun
    it, so this rank's device makes no progress, or does not answer.

    Attributes:
        edges: What each node waits for, and what is known about the call that is missing there.
        unmatched: Pairs of a rank that waits in a send or receive and a peer that has called no other side of its size.
        frozen: Ranks with open collectives that have ended on other members, and these collectives.
        moved: Whether the dumps contradict each other, as those of a job that still moves; nobody waits then.
    """

    def __init__(self, view: Timeline) -> None:
        super().__init__(view)
        self.edges: dict[_Node, dict[_Node, Seen]] = defaultdict(dict)
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

    def exchanged_with(self, rank: int) -> set[int]:
        """The peers with which a rank has completed sends and receives."""
        ends = (self.end_of(call) for call in self.view.facts[rank].collectives if call.completed)
        return {end[1] for end in ends if end is not None}

    def by_number_of_ranks(self, ops: Iterable[Op]) -> list[Op]:
        """These collectives, those in which most ranks wait first."""
        return sorted(ops, key=lambda op: (-len(self.calls[op]), *op))


class _Roots:
    """The search for the roots of a graph."""

    def __init__(self, graph: _WaitGraph) -> None:
        self._graph = graph
        self._facts = graph.view.facts
        self._before: dict[_Node, list[_Node]] = defaultdict(list)
        for node, others in graph.edges.items():
            for other in others:
                self._before[other].append(node)

    def found(self) -> list[Root]:
        """All of them; none if most ranks seem at fault."""
        graph = self._graph
        parts = list(_components(graph.edges))
        home = {node: number for number, nodes in enumerate(parts) for node in nodes}
        ends = [
            nodes
            for number, nodes in enumerate(parts)
            if all(home[other] == number for node in nodes for other in graph.edges.get(node, ()))
        ]
        found = [root for nodes in ends for root in self._at(nodes)]
        if all(root.cause is RootCause.JOINED for root in found):
            found = [self._frozen(rank, ops, ()) for rank, ops in graph.frozen.items()] or found
        return [] if self._are_of_moments(found) else _ranked(found)

    def _are_of_moments(self, found: list[Root]) -> bool:
        """Whether most ranks seem at fault, by hosts and devices: a moving job, dumped at different moments."""
        at_fault = [
            {rank for root in found if root.cause is cause for rank in root.ranks}
            for cause in (RootCause.HOST, RootCause.DEVICE)
        ]
        return all(at_fault) and 2 * len(set().union(*at_fault)) > len(self._graph.open)

    def _at(self, nodes: list[_Node]) -> Iterator[Root]:
        """The root at nodes that wait for nothing else: one rank, one collective, or a circle."""
        ranks = tuple(sorted(node for node in nodes if isinstance(node, int)))
        ops = [node for node in nodes if isinstance(node, tuple)]
        held = tuple(sorted(rank for rank in _ranks_before(nodes, self._before) if rank not in ranks))
        if not ranks:
            yield from self._joined(ops[0], held)
        elif len(nodes) == 1:
            yield from self._alone(ranks[0], held)
        else:
            yield _deadlock(self._graph, ranks, ops, held)

    def _joined(self, op: Op, held: tuple[int, ...]) -> Iterator[Root]:
        called = self._graph.calls[op]
        if len({signature(call) for call in called.values()}) > 1:
            return
        sure = self._graph.lost.isdisjoint(called)
        yield Root(cause=RootCause.JOINED, ranks=tuple(sorted(called)), held=held, ops=(op,), is_sure=sure)

    def _alone(self, rank: int, held: tuple[int, ...]) -> Iterator[Root]:
        graph, waiting = self._graph, self._before.get(rank, ())
        ops = graph.by_number_of_ranks(node for node in waiting if isinstance(node, tuple))
        seen = [graph.edges[node][rank] for node in waiting]
        if rank in graph.frozen:
            yield self._frozen(rank, graph.frozen[rank], held)
        elif Seen.UNREAD in seen:
            yield Root(cause=RootCause.UNREAD, ranks=(rank,), held=held, ops=tuple(ops))
        elif Seen.OPEN in seen:
            # Its device has not reached what others' have started.
            sure = rank not in graph.lost
            yield Root(cause=RootCause.DEVICE, ranks=(rank,), held=held, ops=tuple(ops), is_sure=sure)
        elif graph.open.get(rank) and (peer := self._is_with(rank)) is not None:
            if rank < peer or graph.edges.get(peer):
                pair = tuple(sorted((rank, peer)))
                started = all(graph.open[one][0].started for one in pair) and graph.lost.isdisjoint(pair)
                yield Root(cause=RootCause.JOINED, ranks=pair, held=held, is_sure=started)
        elif seen and not graph.open[rank]:
            yield self._idle(rank, held, tuple(ops), is_absent=Seen.ABSENT in seen)

    def _is_with(self, rank: int) -> int | None:
        """The peer with which a rank is in a send or receive that both have reached."""
        peer = self._graph.waits_with(rank)
        other = self._graph.facing(rank, self._graph.open[rank][0])
        return peer if peer is not None and other is not None and self._graph.is_head(peer, other) else None

    def _frozen(self, rank: int, ops: list[Op], held: tuple[int, ...]) -> Root:
        graph = self._graph
        sure = not ops or any(
            graph.has_surely_ended(other, op) for op in ops for other in graph.members.get(op[0], ()) if other != rank
        )
        sure = sure and not (self._is_overtaken(rank) or self._is_of_another_moment(rank) or self._do_several_move)
        if not ops:
            # Its sends and receives were counted against those of its peer.
            sure = sure and graph.lost.isdisjoint({rank, *graph.passed_by(rank)})
        return Root(cause=RootCause.DEVICE, ranks=(rank,), held=held, ops=tuple(ops), is_sure=sure)

    def _is_of_another_moment(self, rank: int) -> bool:
        """Whether its dump may be older: something had just ended, or its calls were long before those of others."""
        record = record_of(self._facts[rank])
        return record.is_moving or record.is_doubtful

    @cached_property
    def _do_several_move(self) -> bool:
        """Whether something had just ended on several ranks: once a device has failed, all ranks wait."""
        return sum(record_of(facts).is_moving for facts in self._facts.values()) > 1

    def _is_overtaken(self, rank: int) -> bool:
        """Whether others have completed what this rank has not called, so that its dump may be older."""
        graph = self._graph
        return any(
            group.last_enqueued < theirs.last_completed
            for name, group in graph.groups[rank].items()
            for other in graph.members.get(name, ())
            if (theirs := graph.groups.get(other, {}).get(name)) is not None and not (group.is_mixed or theirs.is_mixed)
        )

    def _idle(self, rank: int, held: tuple[int, ...], ops: tuple[Op, ...], *, is_absent: bool) -> Root:
        """The root of a rank with nothing outstanding for which others wait."""
        graph = self._graph
        lost = self._asked_wrongly(rank, held)
        if lost or self._has_passed(rank, held):
            ranks = tuple(sorted((rank, *(lost or held))))
            return Root(cause=RootCause.UNMATCHED, ranks=ranks, circle=ranks, is_sure=graph.lost.isdisjoint(ranks))
        # If a job is dumped at its beginning, some ranks have called nothing yet.
        is_sure = (
            not record_of(self._facts[rank]).is_blank and is_absent and len(held) * 2 >= len(graph.open) - len(held)
        )
        # It may have reached the end of the program together with other idle ranks.
        is_known = bool(ops) or bool(graph.view.silent) or not self._is_level_with_idle(rank)
        is_sure = is_sure and is_known and not self._is_of_another_moment(rank)
        return Root(cause=RootCause.HOST, ranks=(rank,), held=held, ops=ops, is_sure=is_sure)

    def _is_level_with_idle(self, rank: int) -> bool:
        """Whether another member of a group has nothing outstanding, either, and nobody waits for it."""
        graph = self._graph
        return any(
            other != rank and other not in self._before and other in graph.open and graph.is_idle(other)
            for name, group in graph.groups[rank].items()
            if group.last_enqueued and not group.is_mixed
            for other in graph.members.get(name, ())
        )

    def _has_passed(self, rank: int, held: tuple[int, ...]) -> bool:
        """Whether a rank for which only one other waits, in a send or receive, has continued past it.

        Both have completed a collective that was called later, or all others have reached their end as well.
        """
        graph = self._graph
        waiting = held[0] if len(held) == 1 else -1
        if (waiting, rank) not in graph.unmatched or not graph.open[waiting][0].is_p2p:
            return False
        calls = self._facts[waiting].collectives
        later = calls[calls.index(graph.open[waiting][0]) :]
        together = (c for c in later if c.completed and not c.is_p2p and waits_for_all(c))
        others = [other for other in graph.open if other not in (rank, waiting)]
        return any(rank in graph.members.get(call.group, ()) for call in together) or (
            len(others) > 0 and all(graph.is_idle(other) for other in others)
        )

    def _asked_wrongly(self, rank: int, held: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that wait for a rank, if all of them have exchanged data with others, but never with this rank."""
        graph = self._graph
        waiting = tuple(one for one in held if rank in graph.edges.get(one, ()))
        is_alone = all(isinstance(node, int) for node in self._before.get(rank, ()))
        known = graph.exchanged_with(rank)
        are_strangers = all(known and (theirs := graph.exchanged_with(one)) and rank not in theirs for one in waiting)
        return waiting if is_alone and are_strangers and known.isdisjoint(waiting) else ()


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


def _deadlock(graph: _WaitGraph, ranks: tuple[int, ...], ops: list[Op], held: tuple[int, ...]) -> Root:
    """The root of a circle: sends and receives that do not match, or collectives in different orders.

    Args:
        ranks: The ranks of the circle.
        ops: The collectives in it.
        held: The ranks that wait for it.
    """
    core = _core(graph, ranks)
    held = tuple(sorted({*held, *ranks} - set(core)))
    return _unmatched(graph, core, ops, held) or _different_orders(graph, core, ops, held)


def _unmatched(graph: _WaitGraph, ranks: tuple[int, ...], ops: list[Op], held: tuple[int, ...]) -> Root | None:
    """The root if a send or receive of the circle has no other side; None if it is one of collectives only."""
    inside = set(ranks)
    pairs = [(one, other) for one, other in graph.unmatched if one in inside and other in inside]
    # Or one side is in a send or receive whose other side comes after a call that the first has not reached.
    if len(astray := _astray(graph, ranks)) == 1:
        sure = graph.lost.isdisjoint(ranks)
        cause = RootCause.UNMATCHED
        return Root(cause=cause, ranks=astray, held=held, ops=tuple(ops), circle=ranks, is_astray=True, is_sure=sure)
    pairs = pairs or [(one, peer) for one in ranks if (peer := graph.waits_with(one)) in inside and peer is not None]
    if not pairs:
        return None
    at_first = [(one, other) for one, other in pairs if graph.waits_with(one) == other]
    in_pairs = {rank for pair in at_first or pairs for rank in pair}
    both = tuple(sorted(_ranks_in_circles(at_first) or _ranks_in_circles(pairs) or in_pairs))
    # Of several pairs, any may not match; a rank that is in all of them has called too much or too little.
    waits = {frozenset((one, other)) for one in ranks for other in graph.edges.get(one, ()) if other in inside}
    common = tuple(frozenset.intersection(*waits)) if len(waits) > 1 else ()
    is_sure = (len(waits) == 1 or len(common) == 1) and graph.lost.isdisjoint(ranks)
    who = common if len(common) == 1 else both
    return Root(cause=RootCause.UNMATCHED, ranks=who, held=held, ops=tuple(ops), circle=both, is_sure=is_sure)


def _astray(graph: _WaitGraph, circle: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks whose send went to a rank that they have never exchanged data with, while another one waits for it.

    Or whose receive is from such a rank.
    """
    first = {rank: graph.open[rank][0] for rank in circle}
    ends = {rank: end for rank, call in first.items() if (end := graph.end_of(call)) is not None}
    found = []
    for rank, (kind, peer) in ends.items():
        known = graph.exchanged_with(rank)
        waits_for_it = any(
            end == (OTHER_KIND[kind], rank) and other in known and numel(first[other]) == numel(first[rank])
            for other, end in ends.items()
        )
        if (rank, peer) in graph.unmatched and peer not in known and waits_for_it:
            found.append(rank)
    return tuple(found)


def _different_orders(graph: _WaitGraph, ranks: tuple[int, ...], ops: list[Op], held: tuple[int, ...]) -> Root:
    ops = graph.by_number_of_ranks(ops)
    first = [graph.open[rank][0] for rank in ranks]
    own = {(call.group, call.seq) for call in first if not call.is_p2p}
    ops = [op for op in ops if op in own] or ops
    odd, is_sure = _odd_ones(graph, ranks, ops), graph.lost.isdisjoint(ranks)
    return Root(cause=RootCause.ORDER, ranks=odd, held=held, ops=tuple(ops), circle=ranks, is_sure=is_sure)


def _core(graph: _WaitGraph, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks whose devices' first open calls form a circle; all others wait behind something older."""
    edges: dict[_Node, dict[_Node, Seen]] = {rank: dict.fromkeys(_held_up_by(graph, rank), Seen.OPEN) for rank in ranks}
    inside = set(ranks)
    found: set[int] = set()
    for nodes in _components(edges):
        goes_on = any(other in inside and other not in nodes for node in nodes for other in edges.get(node, ()))
        if len(nodes) > 1 and not goes_on:
            found |= {node for node in nodes if isinstance(node, int)}
    return tuple(sorted(found)) or ranks


def _held_up_by(graph: _WaitGraph, rank: int) -> Iterator[int]:
    """The ranks for which a rank's oldest open call waits."""
    first = graph.open[rank][0]
    if not first.is_p2p:
        around = graph.edges.get((first.group, first.seq), ())
        yield from (node for node in around if isinstance(node, int) and node != rank)
        return
    for (_, _, peer), call in graph.ends[rank].items():
        if (call.group, call.seq) == (first.group, first.seq):
            other = graph.facing(rank, call)
            if other is None or not graph.is_head(peer, other) or numel(call) != numel(other):
                yield peer


def _odd_ones(graph: _WaitGraph, circle: tuple[int, ...], ops: list[Op]) -> tuple[int, ...]:
    """The ranks of a circle that use a different order from most; all of them if there is no majority.

    Ranks in other groups of the same kinds count, too.
    """
    about = {group.name: group.description for group in _described(graph)}
    kinds = list({about.get(name, name): (name, seq) for name, seq in reversed(ops)}.items())[::-1][:2]
    numbers = {kind: seq for kind, (_, seq) in kinds}
    orders = {rank: order for rank in graph.view.facts if (order := _order(graph, rank, numbers, about))}
    counts = Counter(orders.values()).most_common()
    if len(counts) < 2 or counts[0][1] == counts[1][1]:
        return circle
    odd = tuple(rank for rank in circle if orders.get(rank, counts[0][0]) != counts[0][0])
    return odd or circle


def _described(graph: _WaitGraph) -> Iterator[Group]:
    return (group for groups in graph.groups.values() for group in groups.values() if group.description)


def _order(graph: _WaitGraph, rank: int, numbers: dict[str, int], about: dict[str, str]) -> tuple[str, ...]:
    """The order in which a rank has called two kinds of group; empty if unknown.

    Args:
        numbers: The number of the call in question, by the kind of group.
        about: Descriptions of groups, by name; groups of one description are of one kind.
    """
    if len(numbers) < 2:
        return ()
    places: list[tuple[float, str]] = []
    for kind, seq in numbers.items():
        own = [name for name in graph.groups[rank] if about.get(name, name) == kind]
        place = _place(graph, rank, (own[0], seq)) if len(own) == 1 else None
        if place is None:
            return ()
        places.append((place, kind))
    if places[0][0] == places[1][0]:
        return ()
    return tuple(kind for _, kind in sorted(places))


def _place(graph: _WaitGraph, rank: int, op: Op) -> float | None:
    """The place in a rank's order of calls: ended before open, and open before uncalled."""
    seen = graph.seen(rank, op)
    if seen is Seen.OPEN:
        return float(graph.open[rank].index(graph.calls[op][rank]))
    return {Seen.ENDED: -1.0, Seen.ABSENT: math.inf}.get(seen)


def _components(edges: _Edges) -> Iterator[list[_Node]]:
    """The strongly connected components (Kosaraju's algorithm, without recursion)."""
    back: dict[_Node, dict[_Node, None]] = defaultdict(dict)
    for node, others in edges.items():
        for other in others:
            back[other][node] = None
    seen: set[_Node] = set()
    order = [node for start in list(edges) for node in _postorder(start, edges, seen)]
    seen.clear()
    for start in reversed(order):
        component = list(_postorder(start, back, seen))
        if component:
            yield component


def _postorder(start: _Node, edges: _Edges, seen: set[_Node]) -> Iterator[_Node]:
    """The reachable nodes that were not seen before, each after those that it leads to."""
    if start in seen:
        return
    seen.add(start)
    path = [(start, iter(edges.get(start, ())))]
    while path:
        node, others = path[-1]
        other = next((one for one in others if one not in seen), None)
        if other is None:
            path.pop()
            yield node
        else:
            seen.add(other)
            path.append((other, iter(edges.get(other, ()))))


def _ranks_before(nodes: Iterable[_Node], before: Mapping[_Node, list[_Node]]) -> set[int]:
    """All ranks from which these can be reached."""
    seen = set(nodes)
    todo = list(seen)
    while todo:
        for node in before.get(todo.pop(), ()):
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return {node for node in seen if isinstance(node, int)}


def _ranks_in_circles(pairs: Iterable[tuple[int, int]]) -> set[int]:
    """Ranks that wait for one another in sends and receives alone."""
    edges: dict[_Node, dict[_Node, None]] = defaultdict(dict)
    for one, other in pairs:
        edges[one][other] = None
    circles = (component for component in _components(edges) if len(component) > 1)
    return {node for component in circles for node in component if isinstance(node, int)}
