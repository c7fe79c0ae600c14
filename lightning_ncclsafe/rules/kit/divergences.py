"""Ranks that called different collectives: where they come apart, who deviates, what each called, and from where."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import DISTRIBUTED, FSDP, LOGGED_VALUES, MODEL_CHECKPOINT
from lightning_ncclsafe.facts import Collective, Frame, ModelUnit, RankFacts, UnitKind
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.rules.kit.activity import (
    Kind,
    condition_around,
    deepest_user_frame,
    is_in,
    is_telling,
    starts_trainer,
    trainer_start,
)
from lightning_ncclsafe.rules.kit.caught import has_gone_on, held_by, held_words, raised_at, skips_handled
from lightning_ncclsafe.rules.kit.meaning import unit_of, unit_words
from lightning_ncclsafe.rules.kit.overruns import aborted, bytes_at_once, few_by_site, is_gone, overrun_of, size_bytes
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.sentences import phase_evidence, stack_evidence
from lightning_ncclsafe.rules.kit.timeline import Divergence, Signature, Timeline, signature
from lightning_ncclsafe.rules.kit.wording import (
    call_words,
    capitalised,
    collective_words,
    condition_words,
    joined,
    location_of,
    ranks_words,
    short_location,
)

# A rank makes a few collectives more or fewer, say for one metric or one save; with more, any loop fits any other.
_MOST = 8
# After as many calls that are the same, the next one is expected to be, too.
_CONTEXT = 2
# So many calls that are the same again show how far ranks are apart.
_ENOUGH = 8

Calls = Sequence[Collective]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Some ranks have made calls in a group that others have not, so that all that follows is off by as many.

    Attributes:
        ranks: Those that are out of step; all of both sides where nothing decides between them.
        call: The first call that only some have made.
        callers: Who has made it.
        others: Who has not.
        count: How many calls it is; 0 where ranks wait in the first of them.
        frame: The line that is to be looked at; None where the call is not the user's.
    """

    ranks: tuple[int, ...]
    call: Collective
    callers: tuple[int, ...]
    others: tuple[int, ...]
    count: int
    frame: Frame | None

    @property
    def is_decided(self) -> bool:
        """Whether it is known which ranks are out of step."""
        return self.ranks in (self.callers, self.others)

    def words(self) -> str:
        """``"rank 0 has called barrier at train.py:7 in save, which ranks 1-2 have not: …"``."""
        at = f" at {short_location(self.frame)}" if self.frame is not None else ""
        condition = condition_of_call(self.call)
        under = f", under {condition_words(condition)}" if condition else ""
        apart = "one call" if self.count == 1 else f"{self.count} calls"
        since = f": since then they are {apart} apart" if self.count else ""
        callers, others = ranks_words(self.callers), ranks_words(self.others)
        if self.ranks == self.others:
            left_out = f"{others} skipped {call_words(self.call)}{at}"
            return f"{left_out}, which {callers} called{under}{since}"
        called = f"{callers} called {call_words(self.call)}{at}{under}"
        return f"{called}, which {others} did not{since}"


@once
def shift(view: Timeline, group: str) -> Shift | None:
    """The first one in a group, as far as the recorder's past and its stacks go; None where none is seen.

    A branch in which each side calls the same from a line of its own is none: what follows is the same again.
    """
    sequences = {rank: calls for rank, calls in view.sequences(group).items() if calls}
    if len(sequences) < 2:
        return None
    first = max(calls[0].seq for calls in sequences.values())
    aligned = {rank: [call for call in calls if call.seq >= first] for rank, calls in sequences.items()}
    for index in range(max(map(len, aligned.values()))):
        here = {rank: calls[index] for rank, calls in aligned.items() if index < len(calls)}
        if any(not call.site for call in here.values()):
            return None
        if len({call.site for call in here.values()}) > 1:
            found = _at(aligned, index, tuple(here))
            if found is not _BRANCH:
                return found
    return None


def condition_of_call(call: Collective) -> str:
    """The condition on the rank under which a call was made; empty if there is none, or its stack is not known."""
    return next((frame.rank_condition for frame in reversed(call.stack) if frame.rank_condition), "")


# Of what is only a branch.
_BRANCH = Shift(ranks=(), call=Collective(group="", seq=0, op=""), callers=(), others=(), count=0, frame=None)


def _at(aligned: dict[int, list[Collective]], index: int, ranks: tuple[int, ...]) -> Shift | None:
    counts = Counter(aligned[rank][index].site for rank in ranks).most_common()
    usual = counts[0][0]
    is_majority = counts[0][1] > counts[1][1]
    many = tuple(rank for rank in ranks if aligned[rank][index].site == usual)
    few = tuple(rank for rank in ranks if rank not in many)
    longest = max(many, key=lambda rank: len(aligned[rank]))
    before, theirs = aligned[longest][:index], aligned[longest][index:]
    own = aligned[few[0]][index:]
    if _is_branch(own, theirs):
        return _BRANCH
    count = _apart(own, theirs)
    if count is None:
        return (
            _in_one_call(few, many, own[0], theirs[0], before)
            if is_majority
            else _against_habit(aligned, index, ranks, before)
        )
    if any(_apart(aligned[rank][index:], theirs) != count for rank in few):
        return None
    callers, others, call = (few, many, own[0]) if count > 0 else (many, few, theirs[0])
    ranks = few if is_majority else _odd_side(call, callers, others, before)
    frame = deepest_user_frame(call.stack)
    return Shift(ranks=ranks, call=call, callers=callers, others=others, count=abs(count), frame=frame)


def _in_one_call(
    few: tuple[int, ...], many: tuple[int, ...], own: Collective, theirs: Collective, before: Calls
) -> Shift | None:
    """All wait in the first call that differs, and most of them in the same."""
    frame, of_others = deepest_user_frame(own.stack), deepest_user_frame(theirs.stack)
    # What is called later on anyway has been come to too early.
    is_usual = any(call.site == own.site for call in before)
    if of_others is not None and (is_usual or frame is None):
        return Shift(ranks=few, call=theirs, callers=many, others=few, count=0, frame=of_others)
    return Shift(ranks=few, call=own, callers=few, others=many, count=0, frame=frame) if frame is not None else None


def _against_habit(
    aligned: dict[int, list[Collective]], index: int, ranks: tuple[int, ...], before: Calls
) -> Shift | None:
    """The same with as many on both sides, one of which has done what all have always done at this place."""
    next_sites = _usual_sites(before, index)
    if not next_sites:
        return None
    callers = tuple(rank for rank in ranks if aligned[rank][index].site in next_sites)
    others = tuple(rank for rank in ranks if rank not in callers)
    usual = {call.site for call in before}
    if not callers or not others:
        return None
    # What is new has been called in addition; what all call later on anyway has been come to too early.
    new = [rank for rank in others if aligned[rank][index].site not in usual]
    call = aligned[new[0] if new else callers[0]][index]
    made, left_out = (tuple(new), callers) if new else (callers, others)
    return Shift(ranks=others, call=call, callers=made, others=left_out, count=0, frame=deepest_user_frame(call.stack))


def _usual_sites(before: Calls, index: int) -> set[str]:
    """The only place from which a call has been made after what was called last; empty where there are more or none."""
    found = {before[at].site for at in range(_CONTEXT, index) if _same_context(before, at, index)}
    return found if len(found) == 1 and found != {""} else set()


def _same_context(before: Calls, at: int, index: int) -> bool:
    return all(before[at - back].site == before[index - back].site for back in range(1, _CONTEXT + 1))


def _is_branch(own: Calls, theirs: Calls) -> bool:
    """Whether both have called the same from different lines, and what follows is the same again."""
    both = len(own) > 1 and len(theirs) > 1
    return both and own[1].site == theirs[1].site and signature(own[0]) == signature(theirs[0])


def _apart(own: Calls, theirs: Calls) -> int | None:
    """How many calls more one side has made, negative for fewer, so that what follows fits; None if nothing does."""
    fitting = [
        (fits, -abs(count), count)
        for count in (*range(1, _MOST + 1), *range(-1, -_MOST - 1, -1))
        if (fits := _fits(own[max(count, 0) :], theirs[max(-count, 0) :]))
    ]
    best: tuple[int, int, int] | None = max(fitting, default=None)
    # As many both ways: which of the two has made calls that the other has not cannot be told.
    if best is None or sum(one[:2] == best[:2] for one in fitting) > 1:
        return None
    return best[2]


def _fits(own: Calls, theirs: Calls) -> int:
    """How many calls are the same; 0 if one of them is not."""
    pairs = [*zip(own, theirs, strict=False)][:_ENOUGH]
    return len(pairs) if all(one.site == other.site for one, other in pairs) else 0


def _odd_side(
    call: Collective, callers: tuple[int, ...], others: tuple[int, ...], before: Iterable[Collective]
) -> tuple[int, ...]:
    """Of two sides of one size the one that is out of step; both where nothing tells."""
    if condition_of_call(call):
        return callers
    # All have made it before.
    if any(earlier.site == call.site for earlier in before):
        return others
    return tuple(sorted((*callers, *others)))


_BETWEEN_TWO = ("send", "recv", "batch_isend_irecv", "send_object_list", "recv_object_list")
_OF_ALL = re.compile(r"!=\s*-1|>=\s*0\b|>\s*-1|is not None")
_WHERE = 4
_VARIANTS = 3
_LISTED = 8
# What a rank has called in as many steps belongs to them.
FEW_STEPS, _STEPS = 2, 4


def culprits(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Those of whom something says that they are out of step, else the minority; all of them where nothing decides.

    A condition on the rank comes first. Of as many on both sides, those are next that went on after an exception.
    """
    every = called_or_ended(view, split)
    ended = len(every) > len(split.calls)
    ranks = split.deviating
    gone_on = has_gone_on(view, ranks) or skips_handled(view, ranks)[0] if len(ranks) == len(split.calls) else ()
    few = (_few_by_room(view, split) or few_by_site(view, every)) if ended else ()
    return tuple(conditioned(view, every)) or gone_on or tuple(out_of_step(view, every)) or few or ranks


def _few_by_room(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The minority, to which those count that gloo has ended: there was room for what they had called, as it says."""
    different = variants(split.calls)
    called = [[*ranks] for _, ranks in different]
    for rank in aborted(view):
        told = overrun_of(view, rank)
        fits = [
            number
            for number, (call, _) in enumerate(different)
            if told is not None and told[1] in bytes_at_once(call, view.job.world_size)
        ]
        if len(fits) != 1:
            return ()
        called[fits[0]].append(rank)
    most, *others = sorted(called, key=len, reverse=True)
    is_most = bool(others) and len(others[0]) < len(most)
    return tuple(sorted(rank for few in others for rank in few)) if is_most else ()


def overrun_in(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Members whose process is gone where the back end is gloo, which ends one that receives too much."""
    group = next((group for group in view.groups if group.name == split.group), None)
    if group is None or not all(call.backend == "gloo" for call in split.calls.values()):
        return ()
    return tuple(rank for rank in view.silent if is_gone(view, rank) and rank in group.members)


def odd_sizes(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The minority, in which a rank that received too much counts for the smallest call."""
    different, overrun = variants(split.calls), overrun_in(view, split)
    if not overrun or len(different) != 2:
        return culprits(view, split)
    smaller, larger = sorted(different, key=lambda variant: size_bytes(variant[0]))
    return tuple(larger[1]) if len(larger[1]) < len(smaller[1]) + len(overrun) else tuple(smaller[1])


@once
def called_by_threads(view: Timeline) -> dict[int, Frame]:
    """The line at which each rank has called a collective in a thread of its own, where collectives do not fit.

    That thread's calls and those of the main thread come in another order on each rank. Where the recorder knows from
    where the call was made that does not fit, it has to be that thread's.
    """
    split = view.divergence or view.lost_divergence
    calls = split.calls if split is not None else {}
    told = {rank: facts.thread_stack for rank, facts in view.facts.items() if _may_be_of_thread(calls.get(rank), facts)}
    told |= {rank: view.witnesses[rank].thread_stack for rank in aborted(view)}
    if split is None and not aborted(view):
        return {}
    lines = {rank: deepest_user_frame(stack) for rank, stack in sorted(told.items()) if stack}
    return {rank: line for rank, line in lines.items() if line is not None}


def _may_be_of_thread(call: Collective | None, facts: RankFacts) -> bool:
    places = {(frame.file, frame.line) for frame in facts.thread_stack}
    return call is None or not call.site or all((frame.file, frame.line) in places for frame in call.stack)


def called_or_ended(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The ranks that have called something, and those that gloo has ended in what is known of their last words."""
    ended = (rank for rank in aborted(view) if view.witnesses[rank].stack)
    return tuple(sorted({*split.calls, *ended}))


def stack_of(view: Timeline, rank: int) -> tuple[Frame, ...]:
    """Where a rank is, or was until it was told that a peer is gone, or until its own process ended; may be empty."""
    if rank not in view.facts:
        return view.witnesses[rank].stack if rank in view.witnesses else ()
    facts = view.facts[rank]
    return facts.exception.stack if facts.exception is not None else facts.stack


def line_of_split(view: Timeline, split: Divergence, ranks: Iterable[int]) -> str:
    """The user's line that is to be looked at, as the recorder knows it; empty where that is unknown.

    A rank whose call has been made at this place before, by any rank, has not made one too many: it has left out the
    call of the others; nor has one whose others have called what has always followed.
    """
    own = [call for rank, call in split.calls.items() if rank in {*ranks}]
    others = [call for rank, call in split.calls.items() if rank not in {*ranks}]
    sequences = view.sequences(split.group).values()
    earlier = {c.site for calls in sequences for c in calls if c.seq < split.seq}
    before = max(([c for c in calls if c.seq < split.seq] for calls in sequences), key=len, default=[])
    usual = _usual_sites(before, len(before))
    is_left_out = bool(usual) and {c.site for c in others} == usual and usual.isdisjoint(c.site for c in own)
    told = [*others, *own] if is_left_out else sorted([*own, *others], key=lambda call: call.site in earlier)
    frames = (deepest_user_frame(call.stack) for call in told if call.site)
    return next((location_of(frame) for frame in frames if frame is not None), "")


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


def in_own_call(view: Timeline, rank: int) -> bool:
    """Whether code of the user's, below the Trainer's, has made the call that a rank is in."""
    stack = stack_of(view, rank)
    return deepest_user_frame(stack[trainer_start(stack) :]) is not None


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


def variants(calls: dict[int, Collective]) -> list[tuple[Collective, list[int]]]:
    """What was called, and by which ranks, the most frequent first."""
    alike: dict[object, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        alike[signature(call)].append(rank)
    return [(calls[ranks[0]], ranks) for ranks in sorted(alike.values(), key=lambda who: (-len(who), who))]


def calls_words(view: Timeline, split: Divergence) -> str:
    """``"ranks 0-2 called all_reduce (8 elements) and rank 3 called barrier"``."""
    different = variants(split.calls)
    listed = [f"{ranks_words(who)} called {_call_words(view, call, who[0])}" for call, who in different[:_VARIANTS]]
    more = len(different) - _VARIANTS
    return " and ".join(listed) + (f" and {more} other variants" if more > 0 else "")


def _call_words(view: Timeline, call: Collective, rank: int) -> str:
    return joined((call_words(call), f"for {words}" if (words := unit_words(call, view.facts[rank])) else ""))


def call_evidence(split: Divergence) -> Iterator[Evidence]:
    """One line for each variant: the collective with its number."""
    for call, who in variants(split.calls)[:_LISTED]:
        text = f"{capitalised(ranks_words(who))} called {collective_words(call)}."
        yield Evidence(source="flight recorder", rank=who[0] if len(who) == 1 else None, text=text)


def condition_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """The conditions on the rank under which these ranks stand where they do."""
    for rank in sorted(ranks)[:_LISTED]:
        condition, frame = condition_around(stack_of(view, rank))
        if condition:
            text = f"{condition_words(condition)} encloses {location_of(frame)}."
            yield Evidence(source="source code", rank=rank, text=text)


def where_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """Where the first of these ranks stand."""
    listed = sorted(ranks)[:_WHERE]
    yield from stack_evidence(view, listed)
    yield from phase_evidence(view, listed)


def called_at(view: Timeline, rank: int) -> Frame | None:
    """The deepest line in the user's code from which a rank called what it waits in, or waited in until it ended.

    Not the line that called the Trainer, which tells nothing of what is called within.
    """
    stack = stack_of(view, rank)
    return deepest_user_frame(stack[trainer_start(stack) :])


def calls_location(view: Timeline, ranks: Iterable[int]) -> str:
    """The same of the first of these ranks that has one; a line within the Trainer tells more than one around it."""
    stacks = [stack_of(view, rank) for rank in ranks]
    frames = (deepest_user_frame(part) for part in (*(stack[trainer_start(stack) :] for stack in stacks), *stacks))
    return next((location_of(frame) for frame in frames if frame is not None), "")


def units_of(view: Timeline, split: Divergence) -> dict[int, ModelUnit]:
    """The FSDP unit that each rank's call sends, as far as its size tells."""
    units = {rank: unit_of(call, view.facts[rank]) for rank, call in split.calls.items()}
    return {rank: unit for rank, unit in units.items() if unit is not None and unit.kind is UnitKind.FSDP_UNIT}


def sent_words(view: Timeline, split: Divergence, rank: int) -> str:
    """What a rank's call sends, ``"the all-gather of FSDP unit layers.3, in forward"``; else the call itself."""
    return unit_words(split.calls[rank], view.facts[rank]) or collective_words(split.calls[rank])


def same_purpose(view: Timeline, split: Divergence) -> bool | None:
    """Whether ranks called all this for one purpose: for parts of the model of one kind, or from one line.

    None where that cannot be told: what a stack says holds for the last call that its rank has made, only, and of two
    calls in one function a rank may have skipped the first. What the user's own code calls, Lightning does not.
    """
    sites = {call.site for call in split.calls.values()}
    if "" not in sites:
        if len(sites) == 1:
            return True
        if shift(view, split.group) is not None:
            return False
    purposes = [_purpose(view, rank, call) for rank, call in split.calls.items()]
    known = [purpose for purpose in purposes if purpose is not None]
    if len(known) < len(purposes):
        stacks = [stack_of(view, rank) for rank, call in split.calls.items() if _is_present(view, rank, call)]
        are_users = {deepest_user_frame(stack[trainer_start(stack) :]) is not None for stack in stacks}
        is_told = len(stacks) == len(split.calls) and all(stacks)
        return False if is_told and len(are_users) > 1 else None
    if len({purpose[:2] for purpose in known}) > 1:
        return False
    return True if len({*known}) == 1 else None


def _purpose(view: Timeline, rank: int, call: Collective) -> tuple[str, str, int] | None:
    """File, function and line that have called this; or "unit" and what of the model it is."""
    facts = view.facts[rank]
    unit = unit_of(call, facts)
    if unit is not None:
        # Buckets are reduced one after the other: another one under one number is another call.
        return "unit", unit.kind.value + (unit.name if unit.kind is UnitKind.DDP_BUCKET else ""), 0
    return _caller(stack_of(view, rank)) if _is_present(view, rank, call) else None


def _is_present(view: Timeline, rank: int, call: Collective) -> bool:
    """Whether a rank's stack says where this was called: it is the last, and the rank waits, or did until it raised."""
    facts = view.facts[rank]
    is_last = not any(later.group == call.group and later.seq > call.seq for later in facts.collectives)
    return is_last and (view.activities[rank].kind is Kind.COLLECTIVE or facts.exception is not None)


def _caller(stack: tuple[Frame, ...]) -> tuple[str, str, int] | None:
    """The deepest line below the Trainer's start that is not part of a collective itself; None where it tells nothing.

    Below FSDP's code one line of forward calls for many parts of the model.
    """
    inside = stack[trainer_start(stack) :]
    for frame in reversed(inside):
        if FSDP.has(frame.file, frame.function) or starts_trainer(frame):
            return None
        if frame.user or (not is_telling(frame) and not DISTRIBUTED.has(frame.file, frame.function)):
            return frame.file, frame.function, frame.line
    return None
