"""Where waiting ends in the wait-for graph of a job, and why.

A chain of waits ends at a root. All other ranks wait for ranks that wait, and cause nothing:

* A rank with nothing outstanding: its host does not call (``HOST``).
* A rank on which a collective is open that has ended on another member: its device makes no progress or does not answer
  (``DEVICE``), whomever the rank waits for.
* A circle: these calls cannot complete together (``ORDER``, or ``UNMATCHED`` if a send or receive has no other side).
* A collective that all members have called, or a send and its receive, that does not complete (``JOINED``).
* A rank of which nothing was read (``UNREAD``).
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from lightning_ncclsafe.rules.kit import Timeline, once, signature
from lightning_ncclsafe.rules.recorded.calls import Op, Seen, has_dumps, has_moved, record_of, waits_for_all
from lightning_ncclsafe.rules.recorded.circles import Node, components, ranks_before
from lightning_ncclsafe.rules.recorded.deadlocks import deadlock
from lightning_ncclsafe.rules.recorded.root import Root, RootCause
from lightning_ncclsafe.rules.recorded.wait_graph import WaitGraph


@once
def roots(view: Timeline) -> tuple[Root, ...]:
    """The roots of a job of which dumps were read; those for which most ranks wait first."""
    if not has_dumps(view.job) or has_moved(view.job):
        return ()
    graph = WaitGraph(view)
    return () if graph.moved else tuple(_Roots(graph).found())


def roots_of(view: Timeline, cause: RootCause) -> list[Root]:
    """The roots of one kind, without those in groups whose members are unknown, because no dump has their counters."""
    known = view.groups_by_name
    return [root for root in roots(view) if root.cause is cause and all(name in known for name, _ in root.ops)]


class _Roots:
    """The search for the roots of a graph."""

    def __init__(self, graph: WaitGraph) -> None:
        self._graph = graph
        self._facts = graph.view.facts
        self._before: dict[Node, list[Node]] = defaultdict(list)
        for node, others in graph.edges.items():
            for other in others:
                self._before[other].append(node)

    def found(self) -> list[Root]:
        """All of them; none if most ranks seem at fault."""
        graph = self._graph
        parts = list(components(graph.edges))
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

    def _at(self, nodes: list[Node]) -> Iterator[Root]:
        """The root at nodes that wait for nothing else: one rank, one collective, or a circle."""
        ranks = tuple(sorted(node for node in nodes if isinstance(node, int)))
        ops = [node for node in nodes if isinstance(node, tuple)]
        held = tuple(sorted(rank for rank in ranks_before(nodes, self._before) if rank not in ranks))
        if not ranks:
            yield from self._joined(ops[0], held)
        elif len(nodes) == 1:
            yield from self._alone(ranks[0], held)
        else:
            yield deadlock(self._graph, ranks, ops, held)

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
                yield Root(cause=RootCause.JOINED, ranks=tuple(sorted((rank, peer))), held=held, is_sure=False)
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
        edges = self._graph.edges
        waiting = tuple(one for one in held if rank in edges.get(one, ()))
        is_alone = all(isinstance(node, int) for node in self._before.get(rank, ()))
        known = self._has_exchanged_with(rank)
        are_strangers = all(
            known and (theirs := self._has_exchanged_with(one)) and rank not in theirs for one in waiting
        )
        return waiting if is_alone and are_strangers and known.isdisjoint(waiting) else ()

    def _has_exchanged_with(self, rank: int) -> set[int]:
        calls = (call for call in self._facts[rank].collectives if call.completed)
        ends = map(self._graph.end_of, calls)
        return {end[1] for end in ends if end is not None}


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
