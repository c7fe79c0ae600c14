"""The cause crossed-groups: ranks entered process groups in different orders and wait for each other in a circle."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

from lightning_ncclsafe.code.libraries import GROUP_CREATION
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import Collective, Group, group_and_backend
from lightning_ncclsafe.rules.kit import (
    FEW_STEPS,
    Confidence,
    Evidence,
    Finding,
    Plan,
    Timeline,
    call_location,
    circle_in,
    circle_of_p2p,
    circle_of_waits,
    clause,
    condition_evidence,
    deepest_user_frame,
    finding,
    gathering_alone,
    group_waited_in,
    group_words,
    hang_rule,
    in_own_call,
    is_in,
    is_of_fsdp,
    location_of,
    once,
    peer_waited_for,
    ranks_words,
    send_recv_pairs,
    short_place,
    skipped_call,
    unit_of,
    verb,
    wait_words,
    waits_in_one_group,
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
_HOPS = 4
_LISTED = 8


@hang_rule(
    after="uneven-batches",
    remedy=(
        "Call the collectives of several groups in one order on all ranks: the same list of groups, sorted alike, and "
        "no group entered under a condition on the rank before another one. With NCCL, this applies to asynchronous "
        "collectives, too: each waits on the device for those before it."
    ),
    plan=Plan.STOP,
)
def crossed_groups(view: Timeline) -> Iterator[Finding]:
    """Ranks wait for each other in different process groups, or create groups in different orders.

    Symptom:
        Each process group reports its own timeout, and in each some members have called nothing. Or all ranks wait in
        new_group.

    Cause:
        Overlapping groups (data and tensor parallel, experts, pipeline stages) that are entered in an order that
        depends on the rank; groups that only their members create, so that ranks number them differently from then on.

    Remedy:
        Use one order of groups on all ranks; call new_group on all ranks for every group, members or not.

    Cannot see:
        Which group is created out of order, unless a condition on the rank precedes it in a function that ranks are in,
        or new_group is called at one line only; that ranks number groups differently, as long as all of them work.
        Sends and receives that wait for each other in a circle cross no groups: see unmatched-p2p.
    """
    circle = circle_of_waits(view)
    is_order = not (
        _is_of_p2p(view, circle)
        or _is_of_one_group(circle)
        or _is_of_new_call(view, circle)
        or any(_votes(view, rank) for rank in circle)
    )
    if circle and not gathering_alone(view) and is_order:
        yield _finding(view, circle)
    elif not circle and (inspected := circle_in(_awaited_by_inspection(view))):
        yield _inspected_finding(view, inspected)
    made = {rank: facts.steps.groups_made for rank, facts in view.facts.items()}
    # Creating a group waits for the others; a rank that works may merely be late for it.
    making = tuple(rank for rank in view.waiting if is_in(GROUP_CREATION, view.facts[rank].stack))
    all_wait = set(view.waiting) == set(view.facts) and not view.silent and not view.raised
    if created := circle_in(_awaited_in_creation(view)):
        yield _created_in_circle(view, created)
    elif making and all_wait and min(made.values()) >= 0 and len({*made.values()}) > 1:
        yield _created_differently(view, making, made)
    elif making and all_wait and len({*made.values()}) == 1:
        # The number of the last one: the default group is number 0.
        name = str(made[making[0]] - 1)
        if len(apart := _members_apart(view, name, making)) > 1:
            yield _of_one_number(view, making, name, apart, f"{clause(making, 'still waits|wait')} in new_group")
    elif not circle and (met := _met_under_one_number(view)) is not None:
        name, waiting, apart = met
        yield _of_one_number(view, waiting, name, apart, f"{clause(waiting, 'waits|wait')} in its first call")


def _is_of_p2p(view: Timeline, circle: dict[int, tuple[str, int]]) -> bool:
    """Whether a send or receive in the circle has no other side: its peer waits in a collective, or for another one."""
    groups = {name for name, _ in circle.values()}
    is_mixed = "" in groups and len(groups) > 1
    return is_mixed or bool(circle_of_p2p(view)) or circle.keys() <= send_recv_pairs(view).keys()


def _is_of_one_group(circle: dict[int, tuple[str, int]]) -> bool:
    """Whether ranks wait for each other in two back ends of one process group, in which they have diverged."""
    groups = {group_and_backend(name)[0] for name, _ in circle.values()}
    return len(groups) == 1 and groups != {""}


def _is_of_new_call(view: Timeline, circle: dict[int, tuple[str, int]]) -> bool:
    """Whether some wait in a user's call in a group of all ranks, while the others exchange the model as usual.

    If no rank has made this call before, as far as the recorders show, no order is wrong: only some have reached it.
    """
    calls = {rank: call for rank in circle if (call := view.activities[rank].collective) is not None}
    own = [rank for rank in calls if in_own_call(view, rank) and not _is_of_model(view, rank)]
    others = [rank for rank in circle if rank not in own]
    sites = {call.site for facts in view.facts.values() for call in facts.collectives if call.completed}
    are_usual = bool(others) and all(rank in calls and calls[rank].site in sites for rank in others)
    are_new = bool(own) and all(calls[rank].site and calls[rank].site not in sites for rank in own)
    groups = {calls[rank].group for rank in own}
    needs_all = all(len(view.groups_by_name[name].members) == view.job.world_size for name in groups)
    return are_new and needs_all and are_usual and all(_is_of_model(view, rank) for rank in others)


def _votes(view: Timeline, rank: int) -> bool:
    """Whether it votes on the next batch, in a group of ours: it has left a batch in which the others wait."""
    return any(frame.mark == Mark.VOTE for frame in view.facts[rank].stack)


def _awaited_in_creation(view: Timeline) -> dict[int, tuple[str, int]]:
    """For each rank that creates a group, its members in words, and one of them that creates another group."""
    making = {rank: tuple(sorted(view.facts[rank].steps.making)) for rank in view.waiting}
    late = _elsewhere({rank: (members, members) for rank, members in making.items() if rank in members})
    return {rank: (ranks_words(making[rank]), other) for rank, other in late.items()}


def _created_in_circle(view: Timeline, circle: dict[int, tuple[str, int]]) -> Finding:
    ranks = tuple(sorted(circle))
    hops = (
        f"rank {rank} creates the group of {members} and waits for rank {late}"
        for rank, (members, late) in circle.items()
    )
    return finding(
        view,
        ranks,
        f"{', '.join(itertools.islice(hops, _HOPS))}: they wait for each other in a circle.",
        location=call_location(view, ranks),
        evidence=(*condition_evidence(view, circle), *where_evidence(view, circle)),
        remedy=_REMEDY_ORDER,
    )


def _created_differently(view: Timeline, making: tuple[int, ...], made: dict[int, int]) -> Finding:
    """Each rank numbers the group that it creates by its own count, and waits for the others under that number."""
    parts = []
    for (count, is_making), ranks in _by_count(making, made).items():
        creates = f"{verb(ranks, 'is creating', 'are creating')} number {count}"
        waits = f"{verb(ranks, 'has', 'have')} created {count} and {verb(ranks, 'waits', 'wait')} elsewhere"
        parts.append(f"{ranks_words(ranks)} {creates if is_making else waits}")
    places = [*dict.fromkeys(place for facts in view.facts.values() for place in facts.steps.groups_at)]
    condition = f"; new_group is called under a condition on the rank at {short_place(places[0])}" if places else ""
    numbers = "have taken part in creating different numbers of process groups"
    # If all are creating one, some have not created an earlier one.
    here = call_location(view, making) if len(making) < len(made) else ""
    return finding(
        view,
        _odd_makers(made),
        f"Ranks {numbers} and wait for each other: {', '.join(parts)}{condition}.",
        location=places[0] if len(places) == 1 else here,
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


def _met_under_one_number(view: Timeline) -> tuple[str, tuple[int, ...], dict[tuple[int, ...], list[int]]] | None:
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
def _by_members(view: Timeline, name: str) -> dict[tuple[int, ...], list[int]]:
    apart: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, group in _known_as(view, name).items():
        apart[group.ranks].append(rank)
    return dict(apart)


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
    each = (f"{ranks_words(one)} on {ranks_words(who)}" for one, who in itertools.islice(apart.items(), _LISTED))
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


def _by_count(making: tuple[int, ...], made: dict[int, int]) -> dict[tuple[int, bool], list[int]]:
    """Ranks by the number of groups that they have created, and whether they are creating one."""
    ranks: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for rank, count in sorted(made.items()):
        ranks[count, rank in making].append(rank)
    return ranks


def _odd_makers(made: dict[int, int]) -> tuple[int, ...]:
    """The ranks that have created a different number than most; all of them if there is no majority."""
    ((usual, often),) = Counter(made.values()).most_common(1)
    return tuple(sorted(rank for rank, count in made.items() if 2 * often <= len(made) or count != usual))


def _awaited_by_inspection(view: Timeline) -> dict[int, tuple[str, int]]:
    """The same for inspected ranks: of their groups' collectives, only the one in which each waits is known."""
    groups = _inspected_groups(view)
    late = _elsewhere({rank: (group.name, group.ranks) for rank, group in groups.items()})
    return {rank: (groups[rank].name, other) for rank, other in late.items()}


def _elsewhere(waits: Mapping[int, tuple[Hashable, Sequence[int]]]) -> dict[int, int]:
    """For ranks that wait in a group, given with its members: a member that waits in another one."""
    late = {
        rank: next((other for other in members if other in waits and waits[other][0] != group), None)
        for rank, (group, members) in waits.items()
    }
    return {rank: other for rank, other in late.items() if other is not None}


def _inspected_groups(view: Timeline) -> dict[int, Group]:
    inspections = {rank: view.facts[rank].inspection for rank in view.waiting}
    groups = {rank: one.group for rank, one in inspections.items() if one is not None and one.moved is False}
    return {rank: group for rank, group in groups.items() if group is not None}


def _finding(view: Timeline, circle: dict[int, tuple[str, int]]) -> Finding:
    skipped = tuple(rank for rank in circle if _has_skipped(view, rank, circle))
    is_decided = 0 < len(skipped) < len(circle)
    ranks = skipped if is_decided else _odd_ones(view, {name for name, _ in circle.values()}, tuple(circle))
    # A rank that waits in a call of Lightning's will not reach the call in which another rank waits for it.
    is_skipped = is_decided and not any(in_own_call(view, rank) for rank in ranks)
    callers = [rank for rank, (_, late) in circle.items() if late in ranks] if is_skipped else ranks
    hops = [_hop(view, rank, name, late) for rank, (name, late) in list(circle.items())[:_HOPS]]
    did = "skipped what it called" if is_skipped else "entered them in a different order"
    why = f", and {ranks_words(ranks)} {did} {'in' if is_skipped else 'from'} every step before" if is_decided else ""
    is_seen = all(name or view.facts[rank].steps.peer >= 0 for rank, (name, _) in circle.items())
    # NCCL's sends and receives return at once: that a rank waits for one is concluded from its line.
    is_certain = is_seen and all(waits_in_one_group(view.facts[rank]) for rank in circle) and not is_decided
    return finding(
        view,
        ranks,
        f"{', '.join(hops)}: they wait for each other in a circle{why}.",
        confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
        # That FSDP gathers a model where the user's code runs it is usual.
        location=call_location(view, sorted(callers, key=lambda rank: _is_of_model(view, rank))),
        evidence=(*_evidence(view, circle), *condition_evidence(view, circle), *where_evidence(view, circle)),
    )


def _is_of_model(view: Timeline, rank: int) -> bool:
    """Whether it waits in a call that exchanges a part of the model."""
    call, facts = view.activities[rank].collective, view.facts[rank]
    return is_of_fsdp(facts) or (call is not None and unit_of(call, facts) is not None)


def _inspected_finding(view: Timeline, circle: dict[int, tuple[str, int]]) -> Finding:
    groups = _inspected_groups(view)
    names = {name for name, _ in circle.values()}
    waits = {rank: group.name for rank, group in groups.items() if group.name in names}
    counts = Counter(waits.values()).most_common()
    # In a smaller group fewer ranks wait, whichever side is wrong.
    is_decided = counts[0][1] > counts[1][1] and len({groups[rank].ranks for rank in waits}) == 1
    odd = (rank for rank, name in sorted(waits.items()) if name != counts[0][0])
    ranks = tuple(odd) if is_decided else tuple(sorted(circle))
    hops = (
        f"rank {rank} waits in {wait_words(view, rank)} of {_of_members(groups[rank])} for rank {late}"
        for rank, (_, late) in list(circle.items())[:_HOPS]
    )
    return finding(
        view,
        ranks,
        f"{', '.join(hops)}: they wait for each other in a circle.",
        location=call_location(view, ranks),
        evidence=(*condition_evidence(view, circle), *where_evidence(view, circle)),
    )


def _of_members(group: Group) -> str:
    return f"{group_words(group.name)} ({ranks_words(group.ranks)})"


def _has_skipped(view: Timeline, rank: int, circle: dict[int, tuple[str, int]]) -> bool:
    """Whether another rank waits for its call in a group that it made in every step before, but not in this one."""
    skipped = skipped_call(view, rank, of_any_group=True)
    return skipped is not None and skipped[1] >= FEW_STEPS and (skipped[0].group, rank) in circle.values()


def _odd_ones(view: Timeline, names: set[str], circle: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that wait in a different one of these groups than most do; all of the circle if nothing decides.

    In a smaller group fewer ranks wait, whichever side is wrong.
    """
    if "" in names:
        return tuple(sorted(rank for rank in view.waiting if peer_waited_for(view, rank) in view.facts))
    waits = {rank: name for rank in view.waiting if (name := group_waited_in(view, rank)) in names}
    if len({group.members for group in view.groups if group.name in names}) > 1:
        return tuple(sorted(circle))
    counts = Counter(waits.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return tuple(sorted(waits))
    return tuple(sorted(rank for rank, name in waits.items() if name != counts[0][0]))


def _hop(view: Timeline, rank: int, name: str, late: int) -> str:
    of = f" of {_named(view, name)}" if name and _description(view, name) else ""
    return f"rank {rank} waits in {wait_words(view, rank)}{of} for rank {late}"


def _evidence(view: Timeline, circle: dict[int, tuple[str, int]]) -> Iterator[Evidence]:
    for rank, (name, late) in list(circle.items())[:_LISTED]:
        if name:
            group = view.groups_by_name[name]
            text = (
                f"Is in number {group.oldest.get(rank, group.seq)} of {_named(view, name)}, of which rank {late} has "
                f"called {group.enqueued.get(late, 0)}."
            )
            yield Evidence(source="flight recorder", rank=rank, text=text)
        else:
            yield Evidence(source="stack", rank=rank, text=f"Is in {wait_words(view, rank)} with rank {late}.")


def _description(view: Timeline, name: str) -> str:
    known = (group.description for facts in view.facts.values() for group in facts.groups if group.name == name)
    description = next(known, "")
    return "" if description in ("undefined", "default_pg") else description


def _named(view: Timeline, name: str) -> str:
    """``"group '1' (tensor_parallel)"``."""
    return group_words(name, _description(view, name))
