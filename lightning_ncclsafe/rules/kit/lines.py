"""Which line is to be looked at where ranks call different things: that of a call, and what led ranks around it.

The line of a call that only some ranks have come to is seen, and is the one that a finding names. The branch that has
led them there, or others around it, is concluded from the source of the functions on the way, which is among the facts:
it stands in the innermost function that both sides were in, behind the last call that both have made, and before the
places where they are.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_ncclsafe.facts import Branch, Collective, Decides, Frame
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.rules.kit.activity import deepest_user_frame, trainer_start
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.shifts import usual_sites
from lightning_ncclsafe.rules.kit.timeline import Divergence, Timeline, signature
from lightning_ncclsafe.rules.kit.wording import capitalised, condition_words, joined, location_of, short_location

# What a reader of the code would look at first.
_RANKED = (Decides.RANK, Decides.VALUE, Decides.PASSES, Decides.EXCEPTION)
_LISTED = 4

Stack = tuple[Frame, ...]


def stack_of(view: Timeline, rank: int) -> tuple[Frame, ...]:
    """Where a rank is, or was until it was told that a peer is gone, or until its own process ended; may be empty."""
    if rank not in view.facts:
        return view.witnesses[rank].stack if rank in view.witnesses else ()
    facts = view.facts[rank]
    return facts.exception.stack if facts.exception is not None else facts.stack


def in_own_call(view: Timeline, rank: int) -> bool:
    """Whether code of the user's, below the Trainer's, has made the call that a rank is in."""
    return called_at(view, rank) is not None


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
    usual = usual_sites(before, len(before))
    is_left_out = bool(usual) and {c.site for c in others} == usual and usual.isdisjoint(c.site for c in own)
    told = [*others, *own] if is_left_out else sorted([*own, *others], key=lambda call: call.site in earlier)
    frames = (deepest_user_frame(call.stack) for call in told if call.site)
    return next((location_of(frame) for frame in frames if frame is not None), "")


@dataclass(frozen=True, slots=True)
class DecidingBranches:
    """What may have led some ranks to a call, and others around it.

    Attributes:
        at: The line of the call.
        ways: Each branch that may have, by its function's frame, from outside in: of all that there are, those that a
            reader would look at first. A condition on the rank comes before one on data, a condition before the number
            of passes of a loop, and that before an exception.
    """

    at: Frame
    ways: tuple[tuple[Frame, Branch], ...]

    @property
    def decided_at(self) -> str:
        """``"file:line in function"`` of the only one; empty if there are several."""
        if len(self.ways) != 1:
            return ""
        frame, branch = self.ways[0]
        return f"{frame.file}:{branch.line} in {frame.function}"

    def words(self) -> str:
        """``"The call at train.py:44 in check may have been skipped by `return` (line 43), under …."``

        Empty if there are several. Of a condition on the rank it is said elsewhere.
        """
        if len(self.ways) != 1 or self.ways[0][1].on is Decides.RANK:
            return ""
        frame, branch = self.ways[0]
        call = f"the call at {short_location(self.at)}"
        told = f"{_branch_words(branch)}{f' in {frame.function}' if frame.function != self.at.function else ''}"
        if branch.jump:
            return f"{capitalised(call)} may have been skipped by {told}."
        what = "How often" if branch.on is Decides.PASSES else "Whether"
        return f"{what} {call} is made may be decided by {told}."

    def evidence(self) -> Iterator[Evidence]:
        """One line if there are several."""
        if len(self.ways) > 1:
            listed = (f"{short_location(_at(frame, branch))}: {_branch_words(branch)}" for frame, branch in self.ways)
            told = "; ".join([*listed][-_LISTED:])
            yield Evidence(source="source code", text=f"What may have led around {short_location(self.at)}: {told}.")


def with_decision(view: Timeline, finding: Finding) -> Finding:
    """The same finding; one whose line is a call that not all ranks have come to says what may have led around it."""
    found = decision(view, finding.location)
    if found is None:
        return finding
    return replace(
        finding,
        summary=joined((finding.summary, found.words())),
        decided_at=found.decided_at,
        evidence=(*finding.evidence, *found.evidence()),
    )


@once
def decision(view: Timeline, location: str) -> DecidingBranches | None:
    """What has led to a call that not all have made; None where nothing is known of it.

    Args:
        view: The job.
        location: The user's line that some ranks call it from, or have.
    """
    if not location:
        return None
    stacks = {rank: users_of(stack_of(view, rank)) for rank in (*view.facts, *view.witnesses)}
    there = {rank for rank, stack in stacks.items() if _is_at(stack, location)}
    made = _made(view, location)
    to_call = max((*(stacks[rank] for rank in there), made.stack), key=len)
    # Where the recorder knows of no difference, those that are elsewhere now.
    others = made.fewer or (stacks.keys() - there if there else frozenset())
    instead = {stacks[rank]: None for rank in sorted(others - there) if rank in stacks}
    ways = leading(branches_around(to_call, before=made.before, instead=instead)) if others else ()
    return DecidingBranches(to_call[-1], ways) if ways else None


def users_of(stack: Iterable[Frame]) -> Stack:
    """The user's frames of a stack, within the Trainer."""
    frames = tuple(stack)
    return tuple(frame for frame in frames[trainer_start(frames) :] if frame.user)


def leading(ways: Iterable[tuple[Frame, Branch]]) -> tuple[tuple[Frame, Branch], ...]:
    """Those that a reader would look at first; what all ranks have alike leads none of them apart."""
    every = tuple(ways)
    kinds = (tuple(way for way in every if way[1].on is kind) for kind in _RANKED)
    return next(filter(None, kinds), ())


def branches_around(to_call: Stack, *, before: Stack = (), instead: Iterable[Stack] = ()) -> list[tuple[Frame, Branch]]:
    """Each branch that may have led around a call, by its function's frame, from outside in.

    Args:
        to_call: The user's frames that have led to it, outermost first.
        before: Those that led to the last call that both sides have made.
        instead: Those of the ranks that have not made it, where they are now.
    """
    kept = [list(frame.branches) for frame in to_call]

    def come_apart(depth: int, inside: list[Branch]) -> None:
        """In this function at the earliest: what stands around its call they have come through together."""
        for outer in range(depth):
            kept[outer] = []
        kept[depth] = inside

    for depth, frame in enumerate(to_call):
        passed = _line_in(frame, before)
        if passed is not None and (inside := _behind(frame, to_call[depth + 1 :], before, passed)) is not None:
            come_apart(depth, inside)
    for stack in instead:
        for depth, frame in enumerate(to_call):
            line = _line_in(frame, stack)
            if line is not None:
                come_apart(depth, _elsewhere(kept[depth], frame, line))
    return [(frame, branch) for frame, branches in zip(to_call, kept, strict=True) for branch in branches]


def _behind(frame: Frame, inner: Stack, before: Stack, line: int) -> list[Branch] | None:
    """What is left of a function's branches behind a line that both have passed; None if that was in another call."""
    if line < frame.line:
        return [branch for branch in frame.branches if branch.line > line]
    if line > frame.line:
        return None
    loops = [index for index, branch in enumerate(frame.branches) if branch.on is Decides.PASSES and not branch.jump]
    if loops:
        return list(frame.branches[loops[0] :])
    # Both have come through this line to what it calls.
    is_further_in = any((found := _line_in(deeper, before)) is not None and found < deeper.line for deeper in inner)
    return [] if is_further_in else None


def _elsewhere(branches: list[Branch], frame: Frame, line: int) -> list[Branch]:
    """What is left where the others are still in the function: they have not returned, and are in all that holds both.

    At the very line, they have come through everything before it.
    """
    if line == frame.line:
        return []
    return [branch for branch in branches if branch.jump != "return" and not branch.line <= line <= branch.until]


def _line_in(frame: Frame, stack: Stack) -> int | None:
    """Where another stack is in a frame's function; None if it is not."""
    lines = (other.line for other in reversed(stack) if (other.file, other.function) == (frame.file, frame.function))
    return next(lines, None)


class _Made(NamedTuple):
    """What the recorder knows of the calls from one line.

    Attributes:
        stack: The user's frames that led to one of them.
        before: Those that led to what all members of its group had called at one place before they came apart.
        fewer: Ranks that have made fewer of these calls than others.
    """

    stack: Stack = ()
    before: Stack = ()
    fewer: Set[int] = frozenset()


def _made(view: Timeline, location: str) -> _Made:
    calls = (call for facts in view.facts.values() for call in facts.collectives if call.stack and not call.is_p2p)
    # One line may be come to by several ways.
    by_site = {call.site: call for call in calls if _is_at(users_of(call.stack), location)}
    found = [_made_from(view, call) for call in by_site.values()]
    return next((made for made in found if made.fewer), found[0] if found else _Made())


def _made_from(view: Timeline, call: Collective) -> _Made:
    sequences = {rank: made for rank, made in view.sequences(call.group).items() if made}
    # From the oldest number that all recorders still have.
    start = max((made[0].seq for made in sequences.values()), default=0)
    aligned = {rank: [one for one in made if one.seq >= start] for rank, made in sequences.items()}
    counts = {rank: sum(one.site == call.site for one in made) for rank, made in aligned.items()}
    fewer = {rank for rank, count in counts.items() if count < max(counts.values())}
    return _Made(users_of(call.stack), users_of(_last_alike(aligned.values())), fewer)


def _last_alike(sequences: Iterable[Sequence[Collective]]) -> Stack:
    """What led to the last call that all have made at one place, before they came apart."""
    last: Stack = ()
    for calls in zip(*sequences, strict=False):
        if len({call.site for call in calls}) == 1:
            last = calls[0].stack
        elif len({signature(call) for call in calls}) > 1:
            break
    return last


def _is_at(users: Stack, location: str) -> bool:
    return bool(users) and location_of(users[-1]) == location


def _at(frame: Frame, branch: Branch) -> Frame:
    return Frame(file=frame.file, line=branch.line, function=frame.function)


def _branch_words(branch: Branch) -> str:
    test = condition_words(branch.test)
    return f"`{branch.jump}` (line {branch.line}), under {test}" if branch.jump else test
