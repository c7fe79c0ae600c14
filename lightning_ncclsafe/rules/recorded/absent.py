"""Members of a group of which nothing was read, while all of whom something was read wait."""

from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.rules.kit import GroupView, Timeline
from lightning_ncclsafe.rules.recorded.ended import gone
from lightning_ncclsafe.rules.recorded.unmatched_p2p import pending_p2p


class Absence(NamedTuple):
    """A group in which ranks wait, and the members that say nothing of it, ascending."""

    group: GroupView
    ranks: tuple[int, ...]


def absences(view: Timeline) -> Iterator[Absence]:
    """Groups that wait, of which some members say nothing, and none of the others is what they wait for."""
    if gone(view):
        return
    for group in view.groups:
        if group.seq is None or idle_behind(view, group):
            continue
        ranks = tuple(rank for rank in group.members if not tells_of(view, rank, group.name))
        if ranks:
            yield Absence(group, ranks)


def tells_of(view: Timeline, rank: int, group: str) -> bool:
    """Whether anything is known of what this rank has called in a group."""
    facts = view.facts.get(rank)
    return facts is not None and any(own.name == group for own in facts.groups)


def idle_behind(view: Timeline, group: GroupView) -> tuple[int, ...]:
    """Members that are known not to have called what others wait in, and that wait for nothing themselves."""
    return tuple(
        rank
        for rank in group.behind
        if tells_of(view, rank, group.name) and not view.waits(rank) and not any(pending_p2p(view.facts[rank]))
    )
