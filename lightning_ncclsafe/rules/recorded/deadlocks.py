"""Calls of several ranks that cannot complete together: each waits for another one of them."""

import math
from collections import Counter
from collections.abc import Iterator

from lightning_ncclsafe.facts import Group
from lightning_ncclsafe.rules.kit import numel
from lightning_ncclsafe.rules.recorded.calls import Op, Seen
from lightning_ncclsafe.rules.recorded.circles import Node, components, ranks_in_circles
from lightning_ncclsafe.rules.recorded.root import Root, RootCause
from lightning_ncclsafe.rules.recorded.wait_graph import WaitGraph


def deadlock(graph: WaitGraph, ranks: tuple[int, ...], ops: list[Op], held: tuple[int, ...]) -> Root:
    """The root of a circle: sends and receives that do not match, or collectives in different orders.

    Args:
        ranks: The ranks of the circle.
        ops: The collectives in it.
        held: The ranks that wait for it.
    """
    core = _core(graph, ranks)
    held = tuple(sorted({*held, *ranks} - set(core)))
    return _unmatched(graph, core, ops, held) or _different_orders(graph, core, ops, held)


def _unmatched(graph: WaitGraph, ranks: tuple[int, ...], ops: list[Op], held: tuple[int, ...]) -> Root | None:
    """The root if a send or receive of the circle has no other side; None if it is one of collectives only."""
    inside = set(ranks)
    pairs = [(one, other) for one, other in graph.unmatched if one in inside and other in inside]
    # Or one side is in a send or receive whose other side comes after a call that the first has not reached.
    pairs = pairs or [(one, peer) for one in ranks if (peer := graph.waits_with(one)) in inside and peer is not None]
    if not pairs:
        return None
    at_first = [(one, other) for one, other in pairs if graph.waits_with(one) == other]
    in_pairs = {rank for pair in at_first or pairs for rank in pair}
    both = tuple(sorted(ranks_in_circles(at_first) or ranks_in_circles(pairs) or in_pairs))
    # Of several pairs, any may not match; a rank that is in all of them has called too much or too little.
    waits = {frozenset((one, other)) for one in ranks for other in graph.edges.get(one, ()) if other in inside}
    common = tuple(frozenset.intersection(*waits)) if len(waits) > 1 else ()
    is_sure = (len(waits) == 1 or len(common) == 1) and graph.lost.isdisjoint(ranks)
    who = common if len(common) == 1 else both
    return Root(cause=RootCause.UNMATCHED, ranks=who, held=held, ops=tuple(ops), circle=both, is_sure=is_sure)


def _different_orders(graph: WaitGraph, ranks: tuple[int, ...], ops: list[Op], held: tuple[int, ...]) -> Root:
    ops = graph.by_number_of_ranks(ops)
    first = [graph.open[rank][0] for rank in ranks]
    own = {(call.group, call.seq) for call in first if not call.is_p2p}
    ops = [op for op in ops if op in own] or ops
    odd, is_sure = _odd_ones(graph, ranks, ops), graph.lost.isdisjoint(ranks)
    return Root(cause=RootCause.ORDER, ranks=odd, held=held, ops=tuple(ops), circle=ranks, is_sure=is_sure)


def _core(graph: WaitGraph, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks whose devices' first open calls form a circle; all others wait behind something older."""
    edges: dict[Node, dict[Node, Seen]] = {rank: dict.fromkeys(_held_up_by(graph, rank), Seen.OPEN) for rank in ranks}
    inside = set(ranks)
    found: set[int] = set()
    for nodes in components(edges):
        goes_on = any(other in inside and other not in nodes for node in nodes for other in edges.get(node, ()))
        if len(nodes) > 1 and not goes_on:
            found |= {node for node in nodes if isinstance(node, int)}
    return tuple(sorted(found)) or ranks


def _held_up_by(graph: WaitGraph, rank: int) -> Iterator[int]:
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


def _odd_ones(graph: WaitGraph, circle: tuple[int, ...], ops: list[Op]) -> tuple[int, ...]:
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


def _described(graph: WaitGraph) -> Iterator[Group]:
    return (group for groups in graph.groups.values() for group in groups.values() if group.description)


def _order(graph: WaitGraph, rank: int, numbers: dict[str, int], about: dict[str, str]) -> tuple[str, ...]:
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


def _place(graph: WaitGraph, rank: int, op: Op) -> float | None:
    """The place in a rank's order of calls: ended before open, and open before uncalled."""
    seen = graph.seen(rank, op)
    if seen is Seen.OPEN:
        return float(graph.open[rank].index(graph.calls[op][rank]))
    return {Seen.ENDED: -1.0, Seen.ABSENT: math.inf}.get(seen)
