"""Ranks that wait for each other in a circle: in collectives of groups, or in sends and receives."""

from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.rules.kit.activity import open_collectives, outstanding_p2p
from lightning_ncclsafe.rules.kit.alone import gathering_alone
from lightning_ncclsafe.rules.kit.landmarks import Kind
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import GroupView, Timeline
from lightning_ncclsafe.rules.kit.waits import has_other_side, peer_of, send_recv_pairs


@once
def circle_of_waits(view: Timeline) -> dict[int, tuple[str, int]]:
    """The ranks that wait for each other in a circle, each with the group that it waits in and the rank it waits for.

    For a send or receive, the group is empty and the rank is the peer.
    """
    return circle_in(_awaited(view))


@once
def circle_of_p2p(view: Timeline) -> dict[int, int]:
    """The ranks of a circle in which each waits in a send or receive, with their peers; empty if there is none.

    A send and its peer's receive are no circle, and neither are calls of several groups, as far as these are known.
    """
    peers = {rank: peer for rank, (name, peer) in circle_of_waits(view).items() if not name}
    calls = (outstanding_p2p(view.facts[rank]) for rank in peers)
    groups = {call.group for call in calls if call is not None}
    is_whole = peers.keys() == circle_of_waits(view).keys()
    is_pair = peers.keys() <= send_recv_pairs(view).keys()
    return peers if is_whole and not is_pair and len(groups) <= 1 and not gathering_alone(view) else {}


def circle_in(awaited: dict[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
    """The ranks that wait for each other in a circle.

    Args:
        awaited: For each rank what it waits in, and the rank that it waits for.
    """
    seen: set[int] = set()
    for start in awaited:
        path: dict[int, None] = {}
        rank = start
        while rank in awaited and rank not in seen:
            seen.add(rank)
            path[rank] = None
            rank = awaited[rank][1]
        if rank in path:
            return {member: awaited[member] for member in list(path)[list(path).index(rank) :]}
    return {}


def group_waited_in(view: Timeline, rank: int) -> str:
    """The group whose collective its main thread is in; empty if it is in none."""
    doing = view.activities[rank]
    return doing.collective.group if doing.collective is not None and doing.kind is Kind.COLLECTIVE else ""


def peer_waited_for(view: Timeline, rank: int) -> int:
    """The rank that this one sends to or receives from, with nothing else outstanding; -1 if there is none."""
    doing = view.activities[rank]
    return peer_of(view, rank) if doing.kind is Kind.COLLECTIVE and doing.collective is None else -1


def waits_in_one_group(facts: RankFacts) -> bool:
    """Whether collectives of one group only are outstanding: otherwise the main thread may wait for another group's."""
    return len({call.group for call in open_collectives(facts)}) <= 1


def _awaited(view: Timeline) -> dict[int, tuple[str, int]]:
    """For each waiting rank, the group that it waits in, and a member that it waits for and that waits elsewhere."""
    by_name = view.groups_by_name
    waits_in = {rank: by_name[name] for rank in view.waiting if (name := group_waited_in(view, rank)) in by_name}
    late = {name: _late(by_name[name], view, waits_in) for name in {group.name for group in waits_in.values()}}
    awaited = {rank: (group.name, last) for rank, group in waits_in.items() if (last := late[group.name]) is not None}
    to_peers = {rank: peer for rank in view.waiting if (peer := peer_waited_for(view, rank)) in view.facts}
    # What both sides have called is not a matter of order.
    return awaited | {rank: ("", peer) for rank, peer in to_peers.items() if not has_other_side(view, rank)}


def _late(group: GroupView, view: Timeline, waits_in: dict[int, GroupView]) -> int | None:
    """A member that is behind in the group and waits elsewhere; None if there is none."""
    others = (rank for rank in group.behind if rank not in waits_in or waits_in[rank].name != group.name)
    elsewhere = (rank for rank in others if rank in waits_in or peer_waited_for(view, rank) >= 0)
    return next(elsewhere, None)
