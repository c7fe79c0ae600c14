"""Which line of the user's code a finding names: that of a call, and the branch that led ranks to it or around it.

The line of a call that only some ranks have reached is observed. The branch that led them there, or others around it,
is concluded from the source of the functions on the way, which is among the facts: it is in the innermost function that
both sides were in, after the last call that both have made, and before their present lines.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import FORWARD, FSDP_FORWARD
from lightning_ncclsafe.facts import ELSE, Branch, Collective, Decides, Frame, ModelUnit, Phase, Progress, UnitKind
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding
from lightning_ncclsafe.facts.wording import (
    at_words,
    capitalised,
    clause,
    condition_place,
    condition_words,
    joined,
    location_of,
    short_location,
    short_place,
    verb,
)
from lightning_ncclsafe.rules.kit.caught_exceptions import continued_after_exception
from lightning_ncclsafe.rules.kit.frames import (
    below_user,
    deepest_user_frame,
    first_user_frame,
    inside_trainer,
    is_in,
    outside_trainer,
    user_frames,
)
from lightning_ncclsafe.rules.kit.gloo_aborts import aborted_by_gloo, gloo_abort_words
from lightning_ncclsafe.rules.kit.purpose import unit_of
from lightning_ncclsafe.rules.kit.rule import at_most_likely, once
from lightning_ncclsafe.rules.kit.timeline import Timeline, signature, stack_of

# A reader of the code would look at the first of these first.
_RANKED = (Decides.RANK, Decides.VALUE, Decides.PASSES, Decides.EXCEPTION)
_LISTED = 4

_Stack = tuple[Frame, ...]


def in_own_call(view: Timeline, rank: int) -> bool:
    """Whether the user's code, below the Trainer, made the call that a rank is in."""
    return called_at(view, rank) is not None


def called_at(view: Timeline, rank: int) -> Frame | None:
    """The deepest line of the user's code below the Trainer on a rank's stack; see :func:`stack_of`."""
    stack = stack_of(view, rank)
    return deepest_user_frame(inside_trainer(stack))


def call_location(view: Timeline, ranks: Iterable[int]) -> str:
    """The location of the deepest user line of the first of these ranks that has one, preferably below the Trainer."""
    stacks = [stack_of(view, rank) for rank in ranks]
    return location_of(first_user_frame([*map(inside_trainer, stacks), *stacks]))


@dataclass(frozen=True, slots=True)
class DecidingBranches:
    """The branches that may have led some ranks to a call, and others around it.

    Attributes:
        at: The line of the call.
        branches: Each with the frame of its function, from outside in; only those that a reader would look at first.
            Conditions on the rank come before conditions on data, these before the number of passes of a loop, and
            these before exceptions.
        around: The ranks that have not made the call, as far as they are known.
        is_of_unit: Whether FSDP makes the call, to run a part of the model at that line.
    """

    at: Frame
    branches: tuple[tuple[Frame, Branch], ...]
    around: tuple[int, ...] = ()
    is_of_unit: bool = False

    @property
    def decided_at(self) -> str:
        """``"file:line in function"`` of the only one; empty if there are several."""
        if len(self.branches) != 1:
            return ""
        return branch_place(*self.branches[0])

    @property
    def condition_at(self) -> str:
        """The same; of a jump, where its condition is."""
        if len(self.branches) != 1:
            return ""
        frame, branch = self.branches[0]
        return condition_place(branch.test, frame) if branch.jump else self.decided_at

    @property
    def differs_at(self) -> str:
        """The line to look at: the condition of a jump if ranks differ in that; else :attr:`decided_at`."""
        if len(self.branches) != 1:
            return ""
        frame, branch = self.branches[0]
        is_of_condition = bool(branch.jump) and branch.differs_at > 0
        return branch_place(frame, replace(branch, line=branch.differs_at)) if is_of_condition else self.decided_at

    @property
    def is_of_rank(self) -> bool:
        """Whether only some ranks can have gone around the call: by a jump under a condition on the rank."""
        return len(self.branches) == 1 and bool(self.branches[0][1].within)

    @property
    def is_of_loop(self) -> bool:
        """Whether it decides how often the call is made: the passes of a loop, or a jump behind the call."""
        if len(self.branches) != 1:
            return False
        frame, branch = self.branches[0]
        return branch.line > frame.line if branch.jump else branch.on is Decides.PASSES

    @property
    def is_jump_on_data(self) -> bool:
        """Whether ranks have gone around the call by a jump before it, under a condition that is not on the rank."""
        if len(self.branches) != 1:
            return False
        frame, branch = self.branches[0]
        return bool(branch.jump) and branch.on is Decides.VALUE and branch.line < frame.line

    def words(self) -> str:
        """``"The call at train.py:44 in check may have been skipped by `return` (line 43), under …."``

        Empty if there are several. A condition on the rank is mentioned elsewhere in the finding.
        """
        if len(self.branches) != 1 or self.branches[0][1].on is Decides.RANK:
            return ""
        frame, branch = self.branches[0]
        call = f"the call at {short_location(self.at)}"
        words = f"{_branch_words(branch)}{f' in {frame.function}' if frame.function != self.at.function else ''}"
        if branch.jump and not self.is_of_loop:
            return f"{capitalised(call)} may have been skipped by {words}."
        what = "How often" if self.is_of_loop else "Whether"
        return f"{what} {call} is made may be decided by {words}."

    def evidence(self) -> Iterator[Evidence]:
        """All of them in one line, if there are several."""
        if len(self.branches) > 1:
            last = self.branches[-_LISTED:]
            listed = (f"{short_place(branch_place(frame, branch))}: {_branch_words(branch)}" for frame, branch in last)
            text = f"What may have led around {short_location(self.at)}: {'; '.join(listed)}."
            yield Evidence(source="source code", text=text)


def with_decision(view: Timeline, finding: Finding) -> Finding:
    """The same finding; if its line is a call that only some ranks have reached, with what may have led around it."""
    if (outer := _outer_decision(view, finding)) is not None:
        return as_concluded(replace(finding, summary=joined((finding.summary, outer.words()))), outer)
    deciding = decision(view, finding.location)
    if deciding is None:
        return finding
    finding = replace(
        finding,
        summary=joined((finding.summary, deciding.words())),
        decided_at=deciding.decided_at or finding.decided_at,
        evidence=(*finding.evidence, *deciding.evidence()),
    )
    # Nobody wrote that call: what is to be looked at is how often the model is run.
    if deciding.is_of_unit and deciding.is_of_loop and deciding.branches[0][0].function != deciding.at.function:
        # Of two ranks, the one that still runs the model makes more passes, unless the other left the loop by a jump.
        is_of_two = len(finding.ranks) == len(view.facts) == view.job.world_size == 2
        is_longer = is_of_two and bool(deciding.around) and not deciding.branches[0][1].jump
        ranks = tuple(sorted({*finding.ranks} - {*deciding.around})) if is_longer else finding.ranks
        return as_concluded(replace(finding, ranks=ranks), deciding)
    # Without a majority, the rank that made the call may have been named, although it is the other one that jumped.
    is_other_side = 0 < 2 * len(deciding.around) <= len(view.facts) and finding.ranks != deciding.around
    has_jumped = deciding.is_of_rank or _is_early_exit(view, deciding)
    if has_jumped and is_other_side and finding.confidence is not Confidence.CERTAIN:
        return as_concluded(replace(finding, ranks=deciding.around), deciding)
    return finding


def as_concluded(finding: Finding, deciding: DecidingBranches) -> Finding:
    """The same finding at the line that decides, which is concluded, not observed: it is likely at most."""
    return replace(
        finding,
        location=deciding.differs_at,
        decided_at=deciding.condition_at,
        confidence=at_most_likely(finding.confidence),
    )


def _is_early_exit(view: Timeline, deciding: DecidingBranches) -> bool:
    """Whether one of two ranks has left before the call by a jump under a condition on a value.

    To go on is usual, and to leave early is not. Of a call that is itself under a condition, either side may be odd;
    and half of more ranks may be a part of a mesh.
    """
    is_one_of_two = len(deciding.around) == 1 and len(view.facts) == view.job.world_size == 2
    return deciding.is_jump_on_data and is_one_of_two and not continued_after_exception(view, view.facts)


def _outer_decision(view: Timeline, finding: Finding) -> DecidingBranches | None:
    """The branch around a call of the Trainer, if the finding's line is in the program that calls it."""
    outer = (user_frames(outside_trainer(stack_of(view, rank))) for rank in finding.ranks)
    is_outside = any(_is_at(frames, finding.location) for frames in outer)
    return _decision_outside(view) if is_outside else None


@once
def _decision_outside(view: Timeline) -> DecidingBranches | None:
    """The branch that led some ranks to a call of the Trainer, and others around it, in the program; None if unknown.

    A condition on the rank is found elsewhere, as the deeper one.
    """
    every = {rank: outside_trainer(stack_of(view, rank)) for rank in sorted({*view.facts, *view.witnesses})}
    stacks = {rank: users for rank, stack in every.items() if (users := user_frames(stack))}
    # Of a process that is gone, the outermost frames may be unknown.
    for frame in next(iter(stacks.values()), ()):
        lines = {rank: _frame_in(frame, stack) for rank, stack in stacks.items()}
        known = {rank: line for rank, line in lines.items() if line is not None}
        if len(known) == len(stacks) and len({line.line for line in known.values()}) > 1:
            return _branch_between(view, known)
    return None


def _branch_between(view: Timeline, lines: dict[int, Frame]) -> DecidingBranches | None:
    """The only condition on data around one of several lines of a function that is not around all of them.

    A rank at an earlier line has bypassed it only if a loop has taken the rank back there.
    """
    found: dict[Branch, Frame] = {}
    different = {frame.line: frame for frame in lines.values()}.values()
    for frame in different:
        for other in different:
            branches = _not_around([*frame.branches], frame, other.line)
            found |= {branch: frame for branch in branches if branch.on is Decides.VALUE}
    if len(found) != 1:
        return None
    ((branch, frame),) = found.items()
    around = tuple(rank for rank, line in lines.items() if branch not in line.branches)
    earlier = (view.facts[rank] for rank in around if rank in view.facts and lines[rank].line < branch.line)
    if any(facts.progress.phase is not Phase.INIT for facts in earlier):
        return None
    return DecidingBranches(frame, ((frame, branch),), around)


@once
def decision(view: Timeline, location: str) -> DecidingBranches | None:
    """The branches that may have led to a call that only some ranks have made; None if none is known.

    Args:
        location: The user's line from which some ranks call it, or have called it.
    """
    if not location:
        return None
    stacks = {rank: user_frames(inside_trainer(stack_of(view, rank))) for rank in (*view.facts, *view.witnesses)}
    there = {rank for rank, stack in stacks.items() if _is_at(stack, location)}
    made = _made(view, location)
    to_call = max((*(stacks[rank] for rank in there), made.stack), key=len)
    # If the recorder shows no difference, the ranks that are elsewhere now.
    others = made.fewer or (stacks.keys() - there if there else frozenset())
    called_in = [view.facts[rank].progress for rank in there if rank in view.facts]
    instead = {
        stacks[rank]: None
        for rank in sorted(others - there)
        if rank in stacks and not _is_in_later_batch(view, rank, called_in)
    }
    every = branches_around(to_call, before=made.before, instead=instead) if others else []
    if made.is_of_unit:
        # A model goes through its parts equally often on all ranks; what runs the model may not.
        every = [one for one in every if not _is_in_model(*one)] or every
    branches = leading_branches(every)
    around = tuple(sorted((others - there) & view.facts.keys()))
    return DecidingBranches(to_call[-1], branches, around, made.is_of_unit) if branches else None


def _is_in_model(frame: Frame, branch: Branch) -> bool:
    """Whether a branch is a loop of a module's ``forward``."""
    return FORWARD.has(frame.file, frame.function) and branch.on is Decides.PASSES and not branch.jump


def _is_in_later_batch(view: Timeline, rank: int, called_in: Iterable[Progress]) -> bool:
    """Whether a rank is in a later batch than those at a call: then it is in another run of the same functions."""
    if rank not in view.facts:
        return False
    own = view.facts[rank].progress
    return any(
        own.phase is other.phase and (own.epoch, own.batch_idx) > (other.epoch, other.batch_idx) for other in called_in
    )


def leading_branches(branches: Iterable[tuple[Frame, Branch]]) -> tuple[tuple[Frame, Branch], ...]:
    """Those that a reader would look at first, without those that all ranks decide alike."""
    # A comprehension is a loop of the function around it, too.
    by_place = {(frame.file, branch.line, branch.jump): (frame, branch) for frame, branch in branches}
    every = tuple(by_place.values())
    by_kind = (tuple((frame, branch) for frame, branch in every if branch.on is kind) for kind in _RANKED)
    return next(filter(None, by_kind), ())


def branches_around(
    to_call: _Stack, *, before: _Stack = (), instead: Iterable[_Stack] = ()
) -> list[tuple[Frame, Branch]]:
    """Each branch that may have led around a call, with the frame of its function, from outside in.

    Args:
        to_call: The user's frames that led to it, outermost first.
        before: The frames that led to the last call that both sides have made.
        instead: The present frames of the ranks that have not made it.
    """
    kept = [list(frame.branches) for frame in to_call]
    # Functions in which both have passed the line of the call: a loop in any of them may have brought one there again.
    again: list[int] = []
    for depth, frame in enumerate(to_call):
        passed = _frame_in(frame, before)
        if passed is not None and (inside := _behind(frame, to_call[depth + 1 :], before, passed.line)) is not None:
            again += [depth] if inside and passed.line == frame.line else []
            _split_at(kept, depth, inside, outer=again if depth in again else ())
    for stack in instead:
        for depth, frame in enumerate(to_call):
            there = _frame_in(frame, stack)
            if there is not None:
                _split_at(kept, depth, _not_around(kept[depth], frame, there.line))
    return [(frame, branch) for frame, branches in zip(to_call, kept, strict=True) for branch in branches]


def _split_at(kept: list[list[Branch]], depth: int, inside: list[Branch], outer: Collection[int] = ()) -> None:
    """Both sides have reached a function: branches around its call did not separate them, but for these outer ones."""
    kept[:depth] = [branches if index in outer else [] for index, branches in enumerate(kept[:depth])]
    kept[depth] = inside


def _behind(frame: Frame, inner: _Stack, before: _Stack, line: int) -> list[Branch] | None:
    """The branches of a function after a line that both sides have passed; None if they passed it in another call."""
    if line < frame.line:
        return [branch for branch in frame.branches if branch.line > line]
    if line > frame.line:
        return None
    loops = [index for index, branch in enumerate(frame.branches) if branch.on is Decides.PASSES and not branch.jump]
    if loops:
        return list(frame.branches[loops[0] :])
    # Both have gone through this line to what it calls.
    is_further_in = any((passed := _frame_in(one, before)) is not None and passed.line < one.line for one in inner)
    return [] if is_further_in else None


def _not_around(branches: list[Branch], frame: Frame, line: int) -> list[Branch]:
    """The branches that may separate a call from ranks at another line of the same function.

    Those ranks have not returned, and are inside of every block that holds both lines. At the very line of the call,
    they have passed every branch before it.
    """
    if line == frame.line:
        return []
    return [branch for branch in branches if branch.jump != "return" and not branch.line <= line <= branch.until]


def _frame_in(frame: Frame, stack: _Stack) -> Frame | None:
    """The frame of another stack in the same function; None if it is not there."""
    found = (other for other in reversed(stack) if (other.file, other.function) == (frame.file, frame.function))
    return next(found, None)


class LeftOutUnit(NamedTuple):
    """A part of a sharded model that some ranks gathered in forward when gloo aborted them, and others have left out.

    Attributes:
        ended: The ranks that were aborted.
        others: The ranks that were gathering another part.
        at: The line that runs the part.
        deciding: What may have led around that line.
        passes: The lines of the backward passes of manual optimization around which the same may have led.
    """

    ended: tuple[int, ...]
    others: tuple[int, ...]
    at: Frame
    deciding: DecidingBranches
    passes: tuple[str, ...]

    def words(self, view: Timeline) -> str:
        """Who has left it out, and what the others were doing; sentences."""
        left_out = f"{clause(self.others, 'has|have left out')} the part of the model at {short_location(self.at)}"
        gathered = f"{clause(self.ended, 'was|were')} gathering its parameters when aborted"
        at = at_words(deepest_user_frame(stack_of(view, self.others[0])))
        went_on = f"{verb(self.others, 'was', 'were')} gathering another one{at}"
        text = f"{left_out}, and {went_on}; {gathered}, {gloo_abort_words(view, self.ended)}."
        return joined((text, self.deciding.words()))


@once
def left_out_unit(view: Timeline) -> LeftOutUnit | None:
    """That part; None if ranks were elsewhere, or if the source does not show one thing that may have led around it."""
    ended, others = aborted_by_gloo(view), tuple(sorted(view.facts))
    if not ended or not others or {*view.silent} != {*ended}:
        return None
    stacks = {rank: stack_of(view, rank) for rank in (*ended, *others)}
    lines = {rank: deepest_user_frame(stack) for rank, stack in stacks.items()}
    at = {frame for rank in ended if (frame := lines[rank]) is not None}
    are_gathering = all(is_in(FSDP_FORWARD, below_user(stack)) for stack in stacks.values())
    if not are_gathering or len(at) != 1 or not at.isdisjoint(lines[rank] for rank in others):
        return None
    (frame,) = at
    deciding = decision(view, location_of(frame))
    if deciding is None or not deciding.decided_at:
        return None
    return LeftOutUnit(ended, others, frame, deciding, _passes_behind(view, frame, deciding))


def _passes_behind(view: Timeline, part: Frame, deciding: DecidingBranches) -> tuple[str, ...]:
    """The backward passes that a rank leaves out with a part of the model; none if it makes one in place of these.

    A condition decides about two blocks: only what is in the part's own block, or its function, is left out with it.
    """
    ways = (item for facts in view.facts.values() for item in facts.steps.led_around.items())
    decided = [*dict.fromkeys(place for place, around in ways if deciding.decided_at in around)]
    return (*decided,) if all(_is_behind(place, part, *deciding.branches[0]) for place in decided) else ()


def _is_behind(place: str, part: Frame, frame: Frame, branch: Branch) -> bool:
    """Whether a line is in the function of the part, if that is called under the condition, or in the same block."""
    at, _, function = place.rpartition(" in ")
    file, _, line = at.rpartition(":")
    if (part.file, part.function) != (frame.file, frame.function):
        return (file, function) == (part.file, part.function)
    # Where the block behind an "else" begins is not known.
    if (file, function) != (frame.file, frame.function) or branch.test.startswith(ELSE) or not line.isdecimal():
        return False
    return branch.line < int(line) and (bool(branch.jump) or int(line) <= branch.until)


class _Made(NamedTuple):
    """What the recorder shows about the calls from one line.

    Attributes:
        stack: The user's frames that led to one of them.
        before: The user's frames that led to the last call that all members of its group made at the same place.
        fewer: Ranks that have made fewer of these calls than others.
        is_of_unit: Whether FSDP makes them.
    """

    stack: _Stack = ()
    before: _Stack = ()
    fewer: Set[int] = frozenset()
    is_of_unit: bool = False


def _made(view: Timeline, location: str) -> _Made:
    calls = ((call, facts) for facts in view.facts.values() for call in facts.collectives)
    stacked = ((call, facts) for call, facts in calls if call.stack and not call.is_p2p)
    # One line may be reached through several callers; and only ranks that wait in the call know its unit.
    by_site: dict[str, list[tuple[Collective, ModelUnit | None]]] = defaultdict(list)
    for call, facts in stacked:
        if _is_at(user_frames(inside_trainer(call.stack)), location):
            by_site[call.site].append((call, unit_of(call, facts)))
    every = [
        _made_from(view, calls[-1][0], next((unit for _, unit in calls if unit is not None), None))
        for calls in by_site.values()
    ]
    return next((made for made in every if made.fewer), every[0] if every else _Made())


def _made_from(view: Timeline, call: Collective, unit: ModelUnit | None) -> _Made:
    sequences = {rank: made for rank, made in view.sequences(call.group).items() if made}
    # From the oldest number that all recorders still have.
    start = max((made[0].seq for made in sequences.values()), default=0)
    aligned = {rank: [one for one in made if one.seq >= start] for rank, made in sequences.items()}
    counts = {rank: sum(one.site == call.site for one in made) for rank, made in aligned.items()}
    fewer = {rank for rank, count in counts.items() if count < max(counts.values())}
    return _Made(
        stack=user_frames(inside_trainer(call.stack)),
        before=user_frames(inside_trainer(_last_alike(aligned.values()))),
        fewer=fewer,
        is_of_unit=unit is not None and unit.kind is UnitKind.FSDP_UNIT,
    )


def _last_alike(sequences: Iterable[Sequence[Collective]]) -> _Stack:
    """The stack of the last call that all have made at the same place, before they diverged."""
    last: _Stack = ()
    for calls in zip(*sequences, strict=False):
        if len({call.site for call in calls}) == 1:
            last = calls[0].stack
        elif len({signature(call) for call in calls}) > 1:
            break
    return last


def _is_at(users: _Stack, location: str) -> bool:
    return bool(users) and location_of(users[-1]) == location


def branch_place(frame: Frame, branch: Branch) -> str:
    """Where it is decided whether a line is reached: ``"FILE:7 in step"``."""
    return branch.handled_at or f"{frame.file}:{branch.line} in {frame.function}"


def _branch_words(branch: Branch) -> str:
    test = condition_words(branch.test)
    within = f", within {condition_words(branch.within)}" if branch.within else ""
    return f"`{branch.jump}` (line {branch.line}), under {test}{within}" if branch.jump else test
