"""Ranks that wait in different calls, according to their stacks: in which, and which ranks are out of step.

What the Flight Recorder shows of different calls is in ``divergences``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import DISTRIBUTED, LOGGED_VALUES, MODEL_CHECKPOINT
from lightning_ncclsafe.facts import ELSE, PAST, Collective, Frame, RankFacts
from lightning_ncclsafe.facts.wording import call_words, under_words
from lightning_ncclsafe.rules.kit.activity import is_in_action, is_open_p2p, outstanding_p2p
from lightning_ncclsafe.rules.kit.caught_exceptions import except_block_words, handling_exception, raised_at
from lightning_ncclsafe.rules.kit.frames import deepest_user_frame, inside_trainer, is_in
from lightning_ncclsafe.rules.kit.landmarks import condition_around, is_landmark
from lightning_ncclsafe.rules.kit.parts import minority, ranks_by
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Signature, Timeline, signature, stack_of
from lightning_ncclsafe.rules.kit.user_lines import in_own_call

_P2P_CALLS = ("send", "recv", "batch_isend_irecv", "send_object_list", "recv_object_list")
# "send 0->1", "recv 1<-0", in ranks of the group: the calling rank comes first.
_ENDS = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")
# Conditions on the rank that hold on all ranks of a distributed job.
_HOLDS_ON_ALL = re.compile(r"!=\s*-1|>=\s*0\b|>\s*-1|is not None")
_HOLDS_ON_NONE = re.compile(r"==\s*-1|<\s*0\b|is None")
# A call belongs to every step if a rank has made it in this many of its last steps.
FEW_STEPS, _STEPS = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentWaits:
    """Ranks inspected from outside that all wait, without moving, in different calls.

    Attributes:
        calls: The ranks in each call, those in the most frequent call first.
        ranks: The ranks that are out of step; all of them if nothing decides.
        why: Why these are; empty if they are only the minority, or the ones in a call of the user's own.
        frame: The line that led them there; None if it is the line of their call.
    """

    calls: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    why: str = ""
    frame: Frame | None = None


@once
def different_waits(view: Timeline) -> DifferentWaits | None:
    """In which calls inspected ranks wait; None if they wait in the same one, or one works, moves or is silent."""
    inspections = [facts.inspection for facts in view.facts.values()]
    if not view.all_wait:
        return None
    if any(inspection is None or inspection.moved is not False for inspection in inspections):
        return None
    by_path = ranks_by({rank: _path_to_wait(view.facts[rank].stack) for rank in view.waiting})
    if len(by_path) < 2:
        return None
    calls = tuple(sorted(by_path.values(), key=lambda ranks: (-len(ranks), ranks)))
    handling = handling_exception(view, view.waiting)
    if handling and len(handling) < len(view.waiting):
        first = handling[min(handling)]
        why = except_block_words(first)
        return DifferentWaits(calls=calls, ranks=tuple(sorted(handling)), why=why, frame=raised_at(first))
    if in_p2p := tuple(rank for rank in view.waiting if view.activities[rank].call in _P2P_CALLS):
        # Each side is under a condition of its own, and no stack shows the peer; with two ranks it is the other one.
        return DifferentWaits(calls=calls, ranks=view.waiting if view.job.world_size == 2 else in_p2p)
    if under := under_rank_condition(view, view.waiting):
        return DifferentWaits(calls=calls, ranks=tuple(sorted(under)), why=next(iter(under.values())))
    own = tuple(rank for rank in view.waiting if in_own_call(view, rank))
    few = minority(calls) or view.waiting
    return DifferentWaits(calls=calls, ranks=own if own and 2 * len(own) <= len(view.waiting) else few)


def _path_to_wait(stack: tuple[Frame, ...]) -> tuple[tuple[str, str, int], ...]:
    """The lines within the Trainer that lead to the wait, without the collective's own code."""
    inside = [*inside_trainer(stack)]
    while len(inside) > 1 and not inside[-1].user and is_of_wait(inside[-1]):
        inside.pop()
    return tuple((frame.file, frame.function, frame.line) for frame in inside)


def is_of_wait(frame: Frame) -> bool:
    """Whether a frame is part of a wait or a collective itself, rather than of its caller."""
    return is_landmark(frame) or DISTRIBUTED.has(frame.file, frame.function)


def peer_of(view: Timeline, rank: int) -> int:
    """The rank that this one sends to or receives from; -1 if it does neither, or the peer is unknown."""
    facts = view.facts[rank]
    if facts.steps.peer >= 0:
        return facts.steps.peer
    call = outstanding_p2p(facts)
    other = _other_end(facts, call) if call is not None else None
    return other[1] if other is not None else -1


def has_other_side(view: Timeline, rank: int) -> bool:
    """Whether the peer has called the other side of a rank's oldest send or receive, with nothing older between both.

    The parts of a batch have one number.
    """
    call = outstanding_p2p(view.facts[rank])
    own = _other_end(view.facts[rank], call) if call is not None else None
    if call is None or own is None or own[1] not in view.facts:
        return False
    peer = view.facts[own[1]]
    ends = [
        (one.seq, _other_end(peer, one)) for one in peer.collectives if one.group == call.group and is_open_p2p(one)
    ]
    with_rank = [(seq, end[0]) for seq, end in ends if end is not None and end[1] == rank]
    return any(seq == with_rank[0][0] and kind != own[0] for seq, kind in with_rank)


def _other_end(facts: RankFacts, call: Collective) -> tuple[str, int] | None:
    return other_end(call, next((group.ranks for group in facts.groups if group.name == call.group), ()))


def other_end(call: Collective, members: tuple[int, ...]) -> tuple[str, int] | None:
    """``("send", 4)``: the kind of a send or receive, and the global rank of its other side, by NCCL's recorder."""
    ends = _ENDS.match(call.op)
    number = int(ends[3]) if ends else -1
    return (ends[1], members[number]) if ends and 0 <= number < len(members) else None


def caller_of(call: Collective, members: tuple[int, ...]) -> int | None:
    """The global rank that called a send or receive."""
    ends = _ENDS.match(call.op)
    number = int(ends[2]) if ends else -1
    return members[number] if 0 <= number < len(members) else None


@once
def send_recv_pairs(view: Timeline) -> dict[int, int]:
    """Ranks that wait in a send and its peer's receive, each with its peer."""
    calls = {rank: view.activities[rank].call for rank in view.waiting if view.activities[rank].collective is None}
    peers = {rank: peer_of(view, rank) for rank in calls}
    return {
        rank: peer
        for rank, peer in peers.items()
        if peers.get(peer) == rank and {calls[rank], calls[peer]} == {"send", "recv"}
    }


class DifferentRoots(NamedTuple):
    """A collective in which ranks wait and name different sources or destinations.

    Attributes:
        group: Name of the group.
        calls: The call by rank.
        roots: Global rank of the source or destination, by rank.
    """

    group: str
    calls: dict[int, Collective]
    roots: dict[int, int]


@once
def different_roots(view: Timeline) -> DifferentRoots | None:
    """The first such collective; None if there is none, or not all roots are known."""
    for group in view.groups:
        calls = view.joined(group)
        roots = {rank: view.facts[rank].steps.root for rank in calls if rank in view.waiting}
        members = sorted(group.members)
        if len({*roots.values()}) > 1 and roots.keys() == calls.keys() and min(roots.values()) >= 0:
            return DifferentRoots(group.name, calls, {rank: members[root] for rank, root in roots.items()})
    return None


@once
def sole_receiver(view: Timeline) -> int | None:
    """The only rank that waits in ``recv``, from any or an unknown rank, while all others wait in collectives; or None.

    A condition on the rank around it explains nothing: both a send and its receive are under one.
    """
    if not view.all_wait:
        return None
    alone = [rank for rank in view.waiting if view.activities[rank].collective is None]
    facts = view.facts[alone[0]] if len(alone) == 1 else None
    if facts is None or facts.inspection is not None or peer_of(view, alone[0]) >= 0:
        return None
    return alone[0] if view.activities[alone[0]].call == "recv" else None


def condition_of(view: Timeline, rank: int) -> str:
    """The condition on the rank around this rank's present line; empty if there is none."""
    return condition_around(stack_of(view, rank))[0]


def out_of_step(view: Timeline, ranks: Iterable[int]) -> dict[int, str]:
    """Of ranks that wait in different calls, those at a place that the others do not reach, and why, in words.

    A condition on the rank decides; if there is none, and both sides have equally many ranks, the call that Lightning
    makes on every rank is the right one.
    """
    every = tuple(sorted(ranks))
    return under_rank_condition(view, every) or _in_calls_of_their_own(view, every)


def under_rank_condition(view: Timeline, ranks: Iterable[int]) -> dict[int, str]:
    """Those of these ranks at a place that only some ranks reach, under a condition or in a hook, and why, in words.

    Empty if all of them are.
    """
    every = tuple(ranks)
    under = {rank: why for rank in every if (why := _why_only_some(view, rank))}
    if 2 * len(under) > len(every):
        under = {rank: why for rank, why in under.items() if not _is_of_all(condition_of(view, rank))}
    return under if len(under) < len(every) else {}


def _is_of_all(condition: str) -> bool:
    """Whether all ranks of a distributed job reach it."""
    return bool((_HOLDS_ON_NONE if condition.startswith((ELSE, PAST)) else _HOLDS_ON_ALL).search(condition))


def _why_only_some(view: Timeline, rank: int) -> str:
    """Why only some ranks reach the place where this one is; empty if nothing shows that."""
    if condition := condition_of(view, rank):
        return under_words(condition)
    in_prepare_data = rank in view.facts and is_in_action(view.facts[rank].progress, ".prepare_data")
    return "in prepare_data, which Lightning calls on one rank of each host" if in_prepare_data else ""


def _in_calls_of_their_own(view: Timeline, ranks: tuple[int, ...]) -> dict[int, str]:
    """The ranks in a call of their own, if equally many are in what Lightning calls on every rank, and why.

    A call that Lightning makes depending on a rank's own values counts as the rank's own. If the others have skipped
    what they called in every step before, they are the ones.
    """
    inside = {rank: inside_trainer(stack_of(view, rank)) for rank in ranks}
    own = {rank: why for rank, stack in inside.items() if (why := _own_call(view, rank, stack))}
    others = tuple(rank for rank in ranks if rank not in own)
    if not own or len(own) != len(others) or not all(map(inside.__getitem__, others)):
        return {}
    # Each rank has logged by itself what is reduced there.
    if any(is_in(LOGGED_VALUES, inside[rank]) for rank in others):
        return {}
    skipped = {rank: call_and_steps for rank in others if (call_and_steps := skipped_call(view, rank))}
    if not skipped:
        return own
    if skipped.keys() != {*others} or any(steps < FEW_STEPS for _, steps in skipped.values()):
        return {}
    words = "after skipping {}, which it called in every step before"
    return {rank: words.format(call_words(call)) for rank, (call, _) in skipped.items()}


def _own_call(view: Timeline, rank: int, stack: tuple[Frame, ...]) -> str:
    if is_in(MODEL_CHECKPOINT, stack) and not _saves_on_all_ranks(view, rank):
        return "in ModelCheckpoint, which decides on each rank whether to save, from the value that it monitors there"
    if deepest_user_frame(stack) is not None:
        return "in a call of the user's code, while the others are in one that Lightning makes on all ranks"
    return ""


def _saves_on_all_ranks(view: Timeline, rank: int) -> bool:
    """Whether a rank is in a ModelCheckpoint, or a class derived from it, that monitors no value."""
    actions = view.facts[rank].progress.actions if rank in view.facts else ()
    return any("{'monitor': None," in action.name for action in actions)


def skipped_call(view: Timeline, rank: int, *, of_any_group: bool = False) -> tuple[Collective, int] | None:
    """The collective that a rank has called in each of its last steps, but not in this one; and in how many steps.

    A step lasts from one call of the collective that the rank is in to the next.

    Args:
        of_any_group: Whether calls in groups other than the one that it waits in count as well.
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
    # The first is not a whole step; the last has only begun with the present call.
    *before, last = steps[1:-1] or [{}]
    before = before[-_STEPS:]
    missing = [call for kind, call in (before[-1].items() if before else ()) if kind not in last]
    usual = (call for call in missing if all((call.group, signature(call)) in step for step in before))
    return next(((call, len(before)) for call in usual), None)
