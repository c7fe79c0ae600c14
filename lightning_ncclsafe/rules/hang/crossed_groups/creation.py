"""Process groups that ranks create in different orders, or number differently, as only some have created one."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_ncclsafe.code.libraries import GROUP_CREATION
from lightning_ncclsafe.facts import Collective, Group
from lightning_ncclsafe.rules.hang.crossed_groups.circles import (
    circle_finding,
    order_words,
    unordered_groups_at,
    waiting_elsewhere,
)
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Finding,
    Timeline,
    call_location,
    circle_in,
    circle_of_waits,
    clause,
    deepest_user_frame,
    finding,
    group_words,
    grouped,
    is_in,
    joined,
    location_of,
    once,
    ranks_by,
    ranks_words,
    short_place,
    verb,
    where_evidence,
)

_REMEDY_MADE = (
    "Call new_group on all ranks for every group, in the same order, even if this rank is not a member; only with "
    "use_local_synchronization=True may the members alone call it."
)
_REMEDY_ORDER = (
    "Create the groups in one order on all ranks, sorted by their members for instance: new_group returns only when "
    "all members of its group have called it."
)
# Descriptions of the groups of a DeviceMesh, and of those that split_group makes.
_OF_MESH, _SPLIT = "mesh_", ":split:"


def created_differently(view: Timeline) -> Finding | None:
    """Ranks that create groups in different orders or numbers, or have met under a number that means two groups."""
    if circle := circle_in(_awaited_in_creation(view)):
        return _in_circle(view, circle)
    made = {rank: facts.steps.groups_made for rank, facts in view.facts.items()}
    # Creating a group waits for the others; a rank that works may merely be late for it.
    making = tuple(rank for rank in view.waiting if is_in(GROUP_CREATION, view.facts[rank].stack))
    if making and view.all_wait and min(made.values()) >= 0 and len({*made.values()}) > 1:
        return _in_different_numbers(view, making, made)
    if making and view.all_wait and len({*made.values()}) == 1:
        # The number of the last one: the default group is number 0.
        name = str(made[making[0]] - 1)
        apart = _members_apart(view, name, making)
        wait = f"{clause(making, 'still waits|wait')} in new_group"
        return _of_one_number(view, making, name, apart, wait) if len(apart) > 1 else None
    if circle_of_waits(view) or (met := _met_under_one_number(view)) is None:
        return None
    name, waiting, known = met
    return _of_one_number(view, waiting, name, known, f"{clause(waiting, 'waits|wait')} in its first call")


def _awaited_in_creation(view: Timeline) -> dict[int, tuple[str, int]]:
    """For each rank that creates a group, its members in words, and one of them that creates another group."""
    making = {rank: tuple(sorted(view.facts[rank].steps.making)) for rank in view.waiting}
    late = waiting_elsewhere({rank: (members, members) for rank, members in making.items() if rank in members})
    return {rank: (ranks_words(making[rank]), other) for rank, other in late.items()}


def _in_circle(view: Timeline, circle: dict[int, tuple[str, int]]) -> Finding:
    hops = (
        f"rank {rank} creates the group of {members} and waits for rank {late}"
        for rank, (members, late) in circle.items()
    )
    return circle_finding(view, tuple(sorted(circle)), circle, hops, remedy=_REMEDY_ORDER)


def _in_different_numbers(view: Timeline, making: tuple[int, ...], made: dict[int, int]) -> Finding:
    """Each rank numbers the group that it creates by its own count, and waits for the others under that number."""
    parts = []
    counts = {rank: (count, rank in making) for rank, count in sorted(made.items())}
    for (count, is_making), ranks in ranks_by(counts).items():
        creates = f"{verb(ranks, 'is creating', 'are creating')} number {count}"
        waits = f"{verb(ranks, 'has', 'have')} created {count} and {verb(ranks, 'waits', 'wait')} elsewhere"
        parts.append(f"{ranks_words(ranks)} {creates if is_making else waits}")
    places = [*dict.fromkeys(place for facts in view.facts.values() for place in facts.steps.groups_at)]
    condition = f"; new_group is called under a condition on the rank at {short_place(places[0])}" if places else ""
    numbers = "have taken part in creating different numbers of process groups"
    # If all are creating one, some have not created an earlier one.
    here = call_location(view, making) if len(making) < len(made) else ""
    unordered_at = "" if places else unordered_groups_at(view)
    return finding(
        view,
        grouped(made).deviating,
        joined(
            (
                f"Ranks {numbers} and wait for each other: {', '.join(parts)}{condition}.",
                order_words(unordered_at),
            )
        ),
        location=places[0] if len(places) == 1 else unordered_at or here,
        evidence=where_evidence(view, view.facts),
        remedy=_REMEDY_MADE,
    )


def _members_apart(view: Timeline, name: str, making: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    """The members of the group that some ranks still create, with the ranks that have created it so.

    PyTorch numbers groups on each rank, and ranks meet under that number. That earlier groups have other members on
    some ranks does no harm: split_group of older versions gives all its parts one number.
    """
    apart: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, facts in sorted(view.facts.items()):
        for members in (group.ranks for group in facts.groups if group.name == name and group.ranks):
            apart[members].append(rank)
    if any(rank in making for ranks in apart.values() for rank in ranks):
        return {}
    for rank in making:
        steps, at = view.facts[rank].steps, location_of(deepest_user_frame(view.facts[rank].stack))
        # A group that its members alone create has no number.
        if rank in steps.making and at in steps.new_groups_at:
            apart[tuple(sorted(steps.making))].append(rank)
    return apart


def _met_under_one_number(view: Timeline) -> tuple[str, tuple[int, ...], dict[tuple[int, ...], tuple[int, ...]]] | None:
    """A group whose number other ranks have given to another group, the ranks that wait in it, and its members.

    All of its members have made its first call: they have met others, who use that number, too.
    Groups that their members alone create have a hash for a name.
    """
    if view.silent or view.raised:
        return None
    seen = set[tuple[str, tuple[int, ...], int, str]]()
    for rank in view.waiting:
        call = view.activities[rank].collective
        if call is None or call.completed or not call.group.isdecimal() or int(call.group) == 0:
            continue
        known = _known_as(view, call.group)
        # It has worked before.
        if (own := known.get(rank)) is None or own.last_completed > 0:
            continue
        if (met := (call.group, own.ranks, call.seq, call.op)) in seen:
            continue
        seen.add(met)
        apart = _by_members(view, call.group)
        # split_group of older versions is NCCL's alone.
        may_be_parts = call.backend.startswith("nccl") and (_is_part(own) or not _new_groups_at(view))
        if len(apart) > 1 and not may_be_parts and all(_has_called(view, one, call) for one in own.ranks):
            return call.group, _waiting_in(view, call.group), apart
    return None


def _is_part(group: Group) -> bool:
    """Whether older versions of torch may have split it from another group: all parts have one number."""
    return group.description.startswith(_OF_MESH) or _SPLIT in group.description


def _known_as(view: Timeline, name: str) -> dict[int, Group]:
    """The group that each rank has under this name, as one of its members."""
    return _own_groups(view).get(name, {})


@once
def _own_groups(view: Timeline) -> dict[str, dict[int, Group]]:
    """The same of all names: in a job of thousands of ranks, there are thousands of them."""
    own: dict[str, dict[int, Group]] = defaultdict(dict)
    for rank, facts in sorted(view.facts.items()):
        for group in facts.groups:
            if rank in group.ranks:
                own[group.name][rank] = group
    return dict(own)


@once
def _by_members(view: Timeline, name: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    return ranks_by({rank: group.ranks for rank, group in _known_as(view, name).items()})


def _waiting_in(view: Timeline, name: str) -> tuple[int, ...]:
    calls = ((rank, view.activities[rank].collective) for rank in view.waiting)
    return tuple(rank for rank, call in calls if call is not None and call.group == name)


def _has_called(view: Timeline, rank: int, call: Collective) -> bool:
    """Whether a rank has made the same call of a group; it may have completed there, with a rank of another group."""
    if rank not in _known_as(view, call.group):
        return False
    calls = ((one.group, one.seq, one.op) for one in view.facts[rank].collectives)
    return (call.group, call.seq, call.op) in calls


def _of_one_number(
    view: Timeline,
    waiting: tuple[int, ...],
    name: str,
    apart: Mapping[tuple[int, ...], Sequence[int]],
    so: str,
) -> Finding:
    """Only the members of each group have created it, so ranks met under one number that mean different groups."""
    each = (f"{ranks_words(one)} on {ranks_words(who)}" for one, who in itertools.islice(apart.items(), LISTED))
    places = _new_groups_at(view)
    ranks = {*waiting, *itertools.chain(*apart.values())}
    return finding(
        view,
        tuple(sorted(ranks)),
        f"Ranks have created different process groups under one number: {group_words(name)} has the members "
        f"{', '.join(each)}; {so}.",
        confidence=Confidence.LIKELY,
        location=places[0] if len(places) == 1 else call_location(view, waiting),
        evidence=where_evidence(view, view.facts),
        remedy=_REMEDY_MADE,
    )


@once
def _new_groups_at(view: Timeline) -> list[str]:
    """The calls of new_group under a condition on the rank; without one, all calls that all ranks have to make."""
    steps = [facts.steps for facts in view.facts.values()]
    conditional = dict.fromkeys(place for known in steps for place in known.groups_at)
    return [*(conditional or dict.fromkeys(place for known in steps for place in known.new_groups_at))]
