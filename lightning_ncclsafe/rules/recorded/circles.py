"""Reachability among ranks that wait: where waiting ends, and circles."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping

Node = Hashable
"""A rank, or a collective in which ranks wait."""
Edges = Mapping[Node, Iterable[Node]]
"""For each node, those that it waits for."""


def components(edges: Edges) -> Iterator[list[Node]]:
    """The strongly connected components (Kosaraju's algorithm, without recursion)."""
    back: dict[Node, dict[Node, None]] = defaultdict(dict)
    for node, others in edges.items():
        for other in others:
            back[other][node] = None
    seen: set[Node] = set()
    order = [node for start in list(edges) for node in _postorder(start, edges, seen)]
    seen.clear()
    for start in reversed(order):
        component = list(_postorder(start, back, seen))
        if component:
            yield component


def _postorder(start: Node, edges: Edges, seen: set[Node]) -> Iterator[Node]:
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


def ranks_before(nodes: Iterable[Node], before: Mapping[Node, list[Node]]) -> set[int]:
    """All ranks from which these can be reached."""
    seen = set(nodes)
    todo = list(seen)
    while todo:
        for node in before.get(todo.pop(), ()):
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return {node for node in seen if isinstance(node, int)}


def ranks_in_circles(pairs: Iterable[tuple[int, int]]) -> set[int]:
    """Ranks that wait for one another in sends and receives alone."""
    edges: dict[Node, dict[Node, None]] = defaultdict(dict)
    for one, other in pairs:
        edges[one][other] = None
    circles = (component for component in components(edges) if len(component) > 1)
    return {node for component in circles for node in component if isinstance(node, int)}
