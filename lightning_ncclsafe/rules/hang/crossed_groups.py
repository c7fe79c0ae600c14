"""The cause crossed-groups: ranks entered process groups in another order, and wait for one another in a circle."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePath

from lightning_ncclsafe.code.libraries import GROUP_CREATION
from lightning_ncclsafe.facts import Collective, Group, RankFacts
from lightning_ncclsafe.rules.kit import (
    FEW_STEPS,
    Confidence,
    Evidence,
    Finding,
    GroupView,
    Kind,
    Plan,
    Timeline,
    calls_location,
    capitalised,
    condition_evidence,
    finding,
    gathering_alone,
    group_words,
    hang_rule,
    in_own_call,
    is_in,
    missed_call,
    ranks_words,
    send_and_receive,
    verb,
    wait_words,
    where_evidence,
)

_TO_PEER = re.compile(r"\d+(?:->|<-)(\d+)")
_REMEDY_MADE = (
    "Call new_group on all ranks for every group, in the same order, even if this rank is not a member; only with "
    "use_local_synchronization=True may the members alone call it."
)
_SAID = 4
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
        Between which ranks an isend or irecv on gloo is, because its recorder does not keep them. Which group is
        created out of turn if no condition on the rank precedes it in a function that ranks are in.
    """
    circle = _circle(_awaited(view))
    if circle and not gathering_alone(view) and not circle.keys() <= send_and_receive(view).keys():
        yield _finding(view, circle)
    elif not circle and (seen := _circle(_awaited_as_seen(view))):
        yield _seen_finding(view, seen)
    made = {rank: facts.steps.groups_made for rank, facts in view.facts.items()}
    # Who makes one waits for the others; who is at work may merely be late for it.
    making = tuple(rank for rank in view.waiting if is_in(GROUP_CREATION, view.facts[rank].stack))
    all_wait = set(view.waiting) == set(view.facts) and not view.silent and not view.raised
    if making and all_wait and min(made.values()) >= 0 and len({*made.values()}) > 1:
        yield _made_apart(view, making, made)


def _made_apart(view: Timeline, making: tuple[int, ...], made: dict[int, int]) -> Finding:
    """Each takes its own count for the number of the group that it makes, and looks for the others there."""
    parts = []
    for (count, makes), ranks in _alike(making, made).items():
        does = f"{verb(ranks, 'is creating', 'are creating')} number {count}"
        waits = f"{verb(ranks, 'has', 'have')} created {count} and {verb(ranks, 'waits', 'wait')} elsewhere"
        parts.append(f"{ranks_words(ranks)} {does if makes else waits}")
    told = [*dict.fromkeys(place for facts in view.facts.values() for place in facts.steps.groups_at)]
    condition = f"; new_group is called under a condition on the rank at {_short(told[0])}" if told else ""
    numbers = "have taken part in creating different numbers of process groups"
    # Where all make one, it is an earlier one that some have not made.
    here = calls_location(view, making) if len(making) < len(made) else ""
    return finding(
        view,
        _odd_makers(made),
        f"Ranks {numbers} and wait for each other: {', '.join(parts)}{condition}.",
        location=told[0] if len(told) == 1 else here,
        evidence=where_evidence(view, view.facts),
        remedy=_REMEDY_MADE,
    )


def _alike(making: tuple[int, ...], made: dict[int, int]) -> dict[tuple[int, bool], list[int]]:
    alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for rank, count in sorted(made.items()):
        alike[count, rank in making].append(rank)
    return alike


def _odd_makers(made: dict[int, int]) -> tuple[int, ...]:
    """Those that have made another number than most; all of them where there is no majority."""
    ((usual, often),) = Counter(made.values()).most_common(1)
    return tuple(sorted(rank for rank, count in made.items() if 2 * often <= len(made) or count != usual))


def _short(place: str) -> str:
    path, _, rest = place.rpartition(":")
    return f"{PurePath(path).name}:{rest}"


def _awaited(view: Timeline) -> dict[int, tuple[str, int]]:
    """For each rank that waits, the group in which it does and a rank there that has not come, which waits, too.

    Of one that sends or receives, the group is empty and the rank its peer.
    """
    by_name = {group.name: group for group in view.groups}
    waits_in = {rank: by_name[name] for rank in view.waiting if (name := _waits_in(view, rank)) in by_name}
    late = {name: _late(by_name[name], view, waits_in) for name in {group.name for group in waits_in.values()}}
    found = {rank: (group.name, last) for rank, group in waits_in.items() if (last := late[group.name]) is not None}
    return found | {rank: ("", peer) for rank in view.waiting if (peer := _peer(view, rank)) in view.facts}


def _awaited_as_seen(view: Timeline) -> dict[int, tuple[str, int]]:
    """The same of ranks seen from outside: of their groups' collectives only that in which each waits is known."""
    groups = _groups_as_seen(view)
    late = {
        rank: next((other for other in of.ranks if other in groups and groups[other].name != of.name), None)
        for rank, of in groups.items()
    }
    return {rank: (groups[rank].name, other) for rank, other in late.items() if other is not None}


def _groups_as_seen(view: Timeline) -> dict[int, Group]:
    seen = {rank: view.facts[rank].inspection for rank in view.waiting}
    still = {rank: one.group for rank, one in seen.items() if one is not None and one.moved is False}
    return {rank: group for rank, group in still.items() if group is not None}


def _waits_in(view: Timeline, rank: int) -> str:
    """The group whose collective its main thread is in; empty where it is in none."""
    doing = view.activities[rank]
    return doing.collective.group if doing.collective is not None and doing.kind is Kind.COLLECTIVE else ""


def _peer(view: Timeline, rank: int) -> int:
    """The rank that this one sends to or receives from, with nothing else outstanding; -1 if there is none."""
    facts, doing = view.facts[rank], view.activities[rank]
    if doing.kind is not Kind.COLLECTIVE or doing.collective is not None:
        return -1
    pending = (call for call in facts.collectives if call.is_p2p and not call.completed)
    told = next((peer for call in pending if (peer := _peer_of(call, facts)) >= 0), -1)
    return facts.steps.peer if facts.steps.peer >= 0 else told


def _peer_of(call: Collective, facts: RankFacts) -> int:
    """NCCL's recorder names both: ``"recv 0<-1"``, in ranks of the group, its own first."""
    found = _TO_PEER.search(call.op)
    members = next((group.ranks for group in facts.groups if group.name == call.group), ())
    return members[int(found[1])] if found and int(found[1]) < len(members) else -1


def _late(group: GroupView, view: Timeline, waits_in: dict[int, GroupView]) -> int | None:
    others = (rank for rank in group.behind if rank not in waits_in or waits_in[rank].name != group.name)
    elsewhere = (rank for rank in others if rank in waits_in or _peer(view, rank) >= 0)
    return next(elsewhere, None)


def _circle(awaited: dict[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
    """The ranks that wait for one another, by way of others, and what for; empty where nobody does."""
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


def _finding(view: Timeline, circle: dict[int, tuple[str, int]]) -> Finding:
    skipped = tuple(rank for rank in circle if _has_skipped(view, rank, circle))
    is_decided = 0 < len(skipped) < len(circle)
    ranks = skipped if is_decided else _odd_ones(view, {name for name, _ in circle.values()}, tuple(circle))
    # One that waits in what Lightning calls will not come to the call in which another waits for it.
    is_left_out = is_decided and not any(in_own_call(view, rank) for rank in ranks)
    callers = [rank for rank, (_, late) in circle.items() if late in ranks] if is_left_out else ranks
    hops = [_hop(view, rank, name, late) for rank, (name, late) in list(circle.items())[:_SAID]]
    did = "skipped what it called" if is_left_out else "entered them in a different order"
    why = f", and {ranks_words(ranks)} {did} {'in' if is_left_out else 'from'} every step before" if is_decided else ""
    is_seen = all(_is_alone(view.facts[rank]) for rank in circle) and not is_decided
    return finding(
        view,
        ranks,
        f"{capitalised(', '.join(hops))}: they wait for each other in a circle{why}.",
        confidence=Confidence.CERTAIN if is_seen else Confidence.LIKELY,
        location=calls_location(view, callers),
        evidence=(*_evidence(view, circle), *condition_evidence(view, circle), *where_evidence(view, circle)),
    )


def _seen_finding(view: Timeline, circle: dict[int, tuple[str, int]]) -> Finding:
    groups = _groups_as_seen(view)
    names = {name for name, _ in circle.values()}
    waits = {rank: group.name for rank, group in groups.items() if group.name in names}
    counts = Counter(waits.values()).most_common()
    # Of a group with fewer members fewer wait, whoever is wrong.
    is_decided = counts[0][1] > counts[1][1] and len({groups[rank].ranks for rank in waits}) == 1
    odd = (rank for rank, name in sorted(waits.items()) if name != counts[0][0])
    ranks = tuple(odd) if is_decided else tuple(sorted(circle))
    hops = (
        f"rank {rank} waits in {wait_words(view, rank)} of {_of_members(groups[rank])} for rank {late}"
        for rank, (_, late) in list(circle.items())[:_SAID]
    )
    return finding(
        view,
        ranks,
        f"{capitalised(', '.join(hops))}: they wait for each other in a circle.",
        location=calls_location(view, ranks),
        evidence=(*condition_evidence(view, circle), *where_evidence(view, circle)),
    )


def _of_members(group: Group) -> str:
    return f"{group_words(group.name)} ({ranks_words(group.ranks)})"


def _has_skipped(view: Timeline, rank: int, circle: dict[int, tuple[str, int]]) -> bool:
    """Whether another waits for it in a group that it has called in every step before, and not in this one."""
    found = missed_call(view, rank, of_any_group=True)
    return found is not None and found[1] >= FEW_STEPS and (found[0].group, rank) in circle.values()


def _is_alone(facts: RankFacts) -> bool:
    """With collectives of several groups outstanding on a device, the main thread may wait for another one."""
    return len({call.group for call in facts.collectives if not call.completed and not call.is_p2p}) <= 1


def _odd_ones(view: Timeline, names: set[str], circle: tuple[int, ...]) -> tuple[int, ...]:
    """Those that wait in another of these groups than most do; all of the circle where nothing decides.

    Of a group with fewer members fewer wait, whoever is wrong.
    """
    if "" in names:
        return tuple(sorted(rank for rank in view.waiting if _peer(view, rank) in view.facts))
    waits = {rank: name for rank in view.waiting if (name := _waits_in(view, rank)) in names}
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
    by_name = {group.name: group for group in view.groups}
    for rank, (name, late) in list(circle.items())[:_LISTED]:
        if name:
            group = by_name[name]
            text = (
                f"Is in number {group.oldest.get(rank, group.seq)} of {_named(view, name)}, of which rank {late} has "
                f"called {group.enqueued.get(late, 0)}."
            )
            yield Evidence(source="flight recorder", rank=rank, text=text)
        else:
            yield Evidence(source="stack", rank=rank, text=f"Is in {wait_words(view, rank)} with rank {late}.")


def _description(view: Timeline, name: str) -> str:
    known = (group.description for facts in view.facts.values() for group in facts.groups if group.name == name)
    found = next(known, "")
    return "" if found in ("undefined", "default_pg") else found


def _named(view: Timeline, name: str) -> str:
    """``"group '1' (tensor_parallel)"``."""
    described = _description(view, name)
    return f"{group_words(name)} ({described})" if described else group_words(name)
