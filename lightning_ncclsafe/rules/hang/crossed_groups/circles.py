"""Ranks that entered process groups in different orders, and wait for each other in a circle of them."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import Group, group_and_backend
from lightning_ncclsafe.rules.kit import (
    FEW_STEPS,
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Timeline,
    call_location,
    circle_in,
    circle_of_p2p,
    circle_of_waits,
    condition_evidence,
    finding,
    gathering_alone,
    group_waited_in,
    group_words,
    in_own_call,
    is_of_fsdp,
    joined,
    peer_waited_for,
    ranks_words,
    send_recv_pairs,
    short_place,
    skipped_call,
    unit_of,
    wait_words,
    waits_in_one_group,
    where_evidence,
)

_HOPS = 4


def entered_in_circle(view: Timeline) -> Finding | None:
    """Ranks that wait for each other in a circle of groups, as far as the order of these is the reason."""
    circle = circle_of_waits(view)
    if not circle:
        inspected = circle_in(_awaited_by_inspection(view))
        return _inspected_finding(view, inspected) if inspected else None
    is_order = not (
        _is_of_p2p(view, circle)
        or _is_of_one_group(circle)
        or _is_of_new_call(view, circle)
        or any(_votes(view, rank) for rank in circle)
    )
    return _finding(view, circle) if is_order and not gathering_alone(view) else None


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
    created_at = "" if is_decided else _created_in_own_order(view, circle)
    is_concluded = is_decided or bool(created_at)
    # NCCL's sends and receives return at once: that a rank waits for one is concluded from its line.
    is_certain = is_seen and all(waits_in_one_group(view.facts[rank]) for rank in circle) and not is_concluded
    return finding(
        view,
        ranks,
        joined((f"{_listed(hops)}: they wait for each other in a circle{why}.", order_words(created_at))),
        confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
        # That FSDP gathers a model where the user's code runs it is usual.
        location=created_at or call_location(view, sorted(callers, key=lambda rank: _is_of_model(view, rank))),
        evidence=(*_evidence(view, circle), *condition_evidence(view, circle), *where_evidence(view, circle)),
    )


def _created_in_own_order(view: Timeline, circle: dict[int, tuple[str, int]]) -> str:
    """The line that may number groups of the same members differently in each process; empty if there is none."""
    names = {name for name, _ in circle.values()}
    # All ranks create the default group first.
    are_made = not any(group_and_backend(name)[0] in ("", "0") for name in names)
    members = {view.groups_by_name[name].members for name in names} if are_made else set()
    return unordered_groups_at(view) if len(members) == 1 else ""


def unordered_groups_at(view: Timeline) -> str:
    """The line that creates groups in the order of a set, if all ranks know of the same; empty if there is none."""
    places = {facts.steps.unordered_groups_at for facts in view.facts.values()}
    return places.pop() if len(places) == 1 else ""


def order_words(created_at: str) -> str:
    """A sentence about that line; empty if there is none."""
    if not created_at:
        return ""
    return (
        f"The groups are created at {short_place(created_at)}, in the order of a set, which may differ between ranks."
    )


def _listed(hops: Sequence[str]) -> str:
    return ", and ".join(hops) if len(hops) <= 2 else "; ".join(hops)


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
        for rank, (_, late) in circle.items()
    )
    return circle_finding(view, ranks, circle, hops)


def circle_finding(
    view: Timeline, ranks: tuple[int, ...], circle: Iterable[int], hops: Iterable[str], *, remedy: str = ""
) -> Finding:
    """A circle of ranks of which only the waits are known, ``"rank 0 waits in … for rank 1"`` for each of them."""
    return finding(
        view,
        ranks,
        f"{_listed([*itertools.islice(hops, _HOPS)])}: they wait for each other in a circle.",
        location=call_location(view, ranks),
        evidence=(*condition_evidence(view, circle), *where_evidence(view, circle)),
        remedy=remedy,
    )


def _awaited_by_inspection(view: Timeline) -> dict[int, tuple[str, int]]:
    """The same for inspected ranks: of their groups' collectives, only the one in which each waits is known."""
    groups = _inspected_groups(view)
    late = waiting_elsewhere({rank: (group.name, group.ranks) for rank, group in groups.items()})
    return {rank: (groups[rank].name, other) for rank, other in late.items()}


def waiting_elsewhere(waits: Mapping[int, tuple[Hashable, Sequence[int]]]) -> dict[int, int]:
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


def _of_members(group: Group) -> str:
    return f"{group_words(group.name)} ({ranks_words(group.ranks)})"


def _is_of_model(view: Timeline, rank: int) -> bool:
    """Whether it waits in a call that exchanges a part of the model."""
    call, facts = view.activities[rank].collective, view.facts[rank]
    return is_of_fsdp(facts) or (call is not None and unit_of(call, facts) is not None)


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
    for rank, (name, late) in list(circle.items())[:LISTED]:
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
