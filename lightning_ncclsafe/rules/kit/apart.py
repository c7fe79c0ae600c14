"""Ranks that wait apart from one another: in which calls, and who of them is out of step."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import DISTRIBUTED, LOGGED_VALUES, MODEL_CHECKPOINT
from lightning_ncclsafe.facts import Collective, Frame
from lightning_ncclsafe.rules.kit.activity import (
    Kind,
    condition_around,
    deepest_user_frame,
    is_in,
    is_telling,
    trainer_start,
)
from lightning_ncclsafe.rules.kit.caught import held_by, held_words, raised_at
from lightning_ncclsafe.rules.kit.lines import in_own_call, stack_of
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Signature, Timeline, signature
from lightning_ncclsafe.rules.kit.wording import (
    call_words,
    condition_words,
)

_BETWEEN_TWO = ("send", "recv", "batch_isend_irecv", "send_object_list", "recv_object_list")
_OF_ALL = re.compile(r"!=\s*-1|>=\s*0\b|>\s*-1|is not None")
# What a rank has called in as many steps belongs to them.
FEW_STEPS, _STEPS = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsApart:
    """Ranks that were looked at from outside, all of which stand still and wait, in different calls.

    Attributes:
        calls: Those that wait in one call, with the call that most wait in first.
        ranks: Those that are out of step; all of them where nothing decides.
        why: Why these are; empty where only their number or whose call it is says so.
        frame: The line that has led them there; None where it is that of their calls.
    """

    calls: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    why: str = ""
    frame: Frame | None = None


@once
def waits_apart(view: Timeline) -> WaitsApart | None:
    """Where ranks seen from outside wait; None if they wait together, or one works, moves or is silent."""
    seen = [facts.inspection for facts in view.facts.values()]
    if view.silent or view.raised or len(view.waiting) < len(seen):
        return None
    if any(inspection is None or inspection.moved is not False for inspection in seen):
        return None
    alike: dict[object, list[int]] = defaultdict(list)
    for rank in view.waiting:
        alike[_path_to_wait(view.facts[rank].stack)].append(rank)
    if len(alike) < 2:
        return None
    calls = sorted(map(tuple, alike.values()), key=lambda ranks: (-len(ranks), ranks))
    held = held_by(view, view.waiting)
    if held and len(held) < len(view.waiting):
        first = held[min(held)]
        return WaitsApart(calls=tuple(calls), ranks=tuple(sorted(held)), why=held_words(first), frame=raised_at(first))
    if exchanging := tuple(rank for rank in view.waiting if view.activities[rank].call in _BETWEEN_TWO):
        # Each side has a condition of its own, and no stack tells who the other is; of two ranks it is the other one.
        return WaitsApart(calls=tuple(calls), ranks=view.waiting if view.job.world_size == 2 else exchanging)
    if under := conditioned(view, view.waiting):
        return WaitsApart(calls=tuple(calls), ranks=tuple(sorted(under)), why=next(iter(under.values())))
    own = tuple(rank for rank in view.waiting if in_own_call(view, rank))
    few = view.waiting if len(calls[0]) == len(calls[1]) else tuple(sorted(sum(calls[1:], ())))
    return WaitsApart(calls=tuple(calls), ranks=own if own and 2 * len(own) <= len(view.waiting) else few)


def _path_to_wait(stack: tuple[Frame, ...]) -> tuple[tuple[str, str, int], ...]:
    """The lines that lead to the wait, within the Trainer; not those of the collective's own code."""
    inside = [*stack[trainer_start(stack) :]]
    while len(inside) > 1 and not inside[-1].user and _is_of_wait(inside[-1]):
        inside.pop()
    return tuple((frame.file, frame.function, frame.line) for frame in inside)


def _is_of_wait(frame: Frame) -> bool:
    return is_telling(frame) or DISTRIBUTED.has(frame.file, frame.function)


@once
def send_and_receive(view: Timeline) -> dict[int, int]:
    """Ranks of which one sends to the other and that one receives from it, with the other; and yet both wait."""
    calls = {rank: view.activities[rank].call for rank in view.waiting if view.activities[rank].collective is None}
    peers = {rank: view.facts[rank].steps.peer for rank in calls}
    return {
        rank: peer
        for rank, peer in peers.items()
        if peers.get(peer) == rank and {calls[rank], calls[peer]} == {"send", "recv"}
    }


def passed_over(view: Timeline, apart: WaitsApart) -> Frame | None:
    """The line at which others wait and which those out of step have gone past; None if they have not.

    They have where both are in one function, these further down: they have not met the others there.
    """
    others = [rank for rank in view.waiting if rank not in apart.ranks]
    if not others or apart.why:
        return None
    own, other = ([*(stack := stack_of(view, rank))[trainer_start(stack) :]] for rank in (apart.ranks[0], others[0]))
    for depth, (one, two) in enumerate(zip(own, other, strict=False)):
        if (one.file, one.function) != (two.file, two.function):
            return None
        if one.line != two.line:
            return deepest_user_frame(tuple(other[depth:])) if one.user and one.line > two.line else None
    return None


class OtherRoots(NamedTuple):
    """Ranks that wait in one call of a group, of which each gives to, or takes from, another rank.

    Attributes:
        group: Name of the group.
        calls: The call by rank.
        roots: Global rank of the source or destination, by rank.
    """

    group: str
    calls: dict[int, Collective]
    roots: dict[int, int]


@once
def other_roots(view: Timeline) -> OtherRoots | None:
    """The first such call; None where there is none, or not all roots are known."""
    for group in view.groups:
        calls = view.joined(group)
        told = {rank: view.facts[rank].steps.root for rank in calls if rank in view.waiting}
        members = sorted(group.members)
        if len({*told.values()}) > 1 and told.keys() == calls.keys() and min(told.values()) >= 0:
            return OtherRoots(group.name, calls, {rank: members[root] for rank, root in told.items()})
    return None


@once
def receives_alone(view: Timeline) -> int | None:
    """The rank that waits to receive, from any or an unknown one, while all others wait in collectives; None without.

    That it stands where only some ranks come says nothing: of a send and a receive each side does.
    """
    if {*view.waiting} != {*view.facts} or view.silent or view.raised:
        return None
    alone = [rank for rank in view.waiting if view.activities[rank].collective is None]
    facts = view.facts[alone[0]] if len(alone) == 1 else None
    if facts is None or facts.inspection is not None or facts.steps.peer >= 0:
        return None
    return alone[0] if view.activities[alone[0]].call == "recv" else None


def condition_of(view: Timeline, rank: int) -> str:
    """The condition on the rank under which its present line stands; empty if there is none."""
    return condition_around(stack_of(view, rank))[0]


def out_of_step(view: Timeline, ranks: Iterable[int]) -> dict[int, str]:
    """Those of ranks that wait apart from one another which are where the others do not come, and why, in words.

    A condition decides; between as many, that the others are in what is called on every rank in every run.
    """
    every = tuple(sorted(ranks))
    return conditioned(view, every) or _in_calls_of_their_own(view, every)


def conditioned(view: Timeline, ranks: Iterable[int]) -> dict[int, str]:
    """Those of ranks that stand where only some ranks come, under a condition or in a hook, and why, in words.

    Empty where that is true of all of them.
    """
    every = tuple(ranks)
    apart = {rank: why for rank in every if (why := _why_apart(view, rank))}
    if 2 * len(apart) > len(every):
        apart = {rank: why for rank, why in apart.items() if not _OF_ALL.search(condition_of(view, rank))}
    return apart if len(apart) < len(every) else {}


def _why_apart(view: Timeline, rank: int) -> str:
    if condition := condition_of(view, rank):
        return f"under {condition_words(condition)}"
    actions = view.facts[rank].progress.actions if rank in view.facts else ()
    in_prepare_data = any(action.name.endswith(".prepare_data") for action in actions)
    return "in prepare_data, which Lightning calls on one rank of each host" if in_prepare_data else ""


def _in_calls_of_their_own(view: Timeline, ranks: tuple[int, ...]) -> dict[int, str]:
    """Of as many ranks in calls of their own as in what Lightning calls on every rank, the first.

    What Lightning calls where a rank's own values say so counts as the rank's. Where the others have left out what they
    have called in every step before, it is they.
    """
    inside = {rank: (stack := stack_of(view, rank))[trainer_start(stack) :] for rank in ranks}
    own = {rank: why for rank, stack in inside.items() if (why := _own_call(stack))}
    others = tuple(rank for rank in ranks if rank not in own)
    if not own or len(own) != len(others) or not all(map(inside.__getitem__, others)):
        return {}
    # What is reduced there each rank has logged itself.
    if any(is_in(LOGGED_VALUES, inside[rank]) for rank in others):
        return {}
    skipped = {rank: found for rank in others if (found := missed_call(view, rank))}
    if not skipped:
        return own
    if skipped.keys() != {*others} or any(steps < FEW_STEPS for _, steps in skipped.values()):
        return {}
    words = "after skipping {}, which it called in every step before"
    return {rank: words.format(call_words(call)) for rank, (call, _) in skipped.items()}


def _own_call(stack: tuple[Frame, ...]) -> str:
    if is_in(MODEL_CHECKPOINT, stack):
        return "in ModelCheckpoint, which saves where the value that it monitors says so on its rank"
    if deepest_user_frame(stack) is not None:
        return "in a call of the user's own, while the others are in what Lightning calls on all ranks"
    return ""


def missed_call(view: Timeline, rank: int, *, of_any_group: bool = False) -> tuple[Collective, int] | None:
    """What a rank has called in each of its last steps, and not in this one; and in how many of them.

    A step goes from one call of what it is in to the next.

    Args:
        view: The job.
        rank: The rank.
        of_any_group: Whether calls of other groups than that which it waits in count, too.
    """
    if rank not in view.facts:
        return None
    entries = [entry for entry in view.facts[rank].collectives if not entry.is_p2p]
    present = view.activities[rank].collective or next(reversed(entries), None)
    if present is None:
        return None
    steps: list[dict[tuple[str, Signature], Collective]] = [{}]
    for entry in entries:
        if entry.group != present.group and not of_any_group:
            continue
        if entry.group != present.group or entry.seq <= present.seq:
            if (entry.group, signature(entry)) == (present.group, signature(present)):
                steps.append({})
            else:
                steps[-1][entry.group, signature(entry)] = entry
    # The first is no whole step, the last one has only begun with the present call.
    *before, last = steps[1:-1] or [{}]
    before = before[-_STEPS:]
    missing = [found for kind, found in (before[-1].items() if before else ()) if kind not in last]
    usual = (call for call in missing if all((call.group, signature(call)) in step for step in before))
    return next(((call, len(before)) for call in usual), None)


def crossed(view: Timeline) -> tuple[int, ...]:
    """Ranks that others wait for and that wait themselves, elsewhere: the wait is a circle."""
    if view.working(view.facts) or any(facts.exception for facts in view.facts.values()):
        return ()
    if receives_alone(view) is not None:
        return ()
    return tuple(rank for rank in view.behind if view.activities[rank].waits_for_peers)


def after_the_others(view: Timeline) -> tuple[int, ...]:
    """Ranks that wait under a condition on the rank, and all for whom they wait have finished."""
    have_finished = all(view.activities[rank].kind is Kind.FINISHED for rank in view.behind)
    return tuple(rank for rank in view.waiting if condition_of(view, rank)) if view.behind and have_finished else ()


def finished_before(view: Timeline) -> tuple[int, ...]:
    """The few that have finished, where all others wait at one line of the user's own."""
    are_over = all(view.activities[rank].kind is Kind.FINISHED for rank in view.behind)
    if not are_over or 2 * len(view.behind) >= len(view.facts) or {*view.behind, *view.waiting} != {*view.facts}:
        return ()
    inside = (view.facts[rank].stack[trainer_start(view.facts[rank].stack) :] for rank in view.waiting)
    lines = {deepest_user_frame(stack) for stack in inside}
    return view.behind if len(lines) == 1 and None not in lines else ()


def other_call_sites(view: Timeline) -> tuple[int, ...]:
    """Ranks that joined the same collective from another function than most did."""
    sites: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in view.waiting:
        doing = view.activities[rank]
        # With several outstanding the stack says nothing about the oldest.
        if doing.kind is not Kind.COLLECTIVE or doing.frame is None or not _sole(view, rank):
            return ()
        sites[(doing.frame.file, doing.frame.function)].append(rank)
    if len(sites) < 2 or not any(view.joined(group) for group in view.groups):
        return ()
    most = max(sites.values(), key=len)
    few = tuple(rank for who in sites.values() if who is not most for rank in who)
    return tuple(sorted(few if len(few) < len(most) else (*few, *most)))


def _sole(view: Timeline, rank: int) -> bool:
    pending = [entry for entry in view.facts[rank].collectives if not entry.completed and not entry.is_p2p]
    return len(pending) == 1 and not view.activities[rank].on_device
