"""Calls in a group that only some ranks have made, so that all later calls are shifted, as the recorder shows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_ncclsafe.code.libraries import JOIN, METRIC_GATHER
from lightning_ncclsafe.facts import Collective, Frame, Progress
from lightning_ncclsafe.facts.wording import at_words, call_words, ranks_words, under_words
from lightning_ncclsafe.rules.kit.activity import is_in_action
from lightning_ncclsafe.rules.kit.frames import (
    deepest_user_frame,
    depth_passed,
    inside_trainer,
    is_before,
    is_in,
    is_in_loop_below,
    loop_left,
    user_frames,
)
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import ROOTED, Timeline, signature

# A rank makes a few calls more or fewer, for one metric or one save; larger shifts would match any loop.
_MAX_SHIFT = 8
# After this many equal calls, the next one is expected to be equal, too.
_CONTEXT = 2
# If several have followed these, this many are compared.
_MOST_CONTEXT = 32
# This many equal calls after the shift show its size.
_ENOUGH = 8
# With this many different pasts of ranks on the usual side, those of the others are compared.
_MOST_VARIANTS = 8

_Calls = Sequence[Collective]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Some ranks have made calls in a group that others have not, so that all later calls are off by as many.

    Attributes:
        ranks: The ranks that are out of step; both sides if nothing decides between them.
        call: The first call that only some have made.
        callers: The ranks that have made it.
        others: The ranks that have not.
        count: The number of such calls; 0 if ranks wait in the first of them.
        frame: The line to look at; None if the call is not the user's.
        is_at_one_line: Whether all have made it there. If not, the ranks that have not may belong to another line.
        is_by_habit: Whether only habit decides: nobody has made the call before, which the others may have left out.
    """

    ranks: tuple[int, ...]
    call: Collective
    callers: tuple[int, ...]
    others: tuple[int, ...]
    count: int
    frame: Frame | None
    is_at_one_line: bool = True
    is_by_habit: bool = False

    @property
    def is_decided(self) -> bool:
        """Whether it is known which ranks are out of step."""
        return self.ranks in (self.callers, self.others)

    def words(self) -> str:
        """``"rank 0 has called barrier at train.py:7 in save, which ranks 1-2 have not: …"``."""
        at = at_words(self.frame) + ("" if self.is_at_one_line else " or at another line")
        condition = _condition_of(self.call) if self.is_at_one_line else ""
        under = f", {under_words(condition)}" if condition else ""
        distance = "one call" if self.count == 1 else f"{self.count} calls"
        since = f": since then they are {distance} apart" if self.count else ""
        callers, others = ranks_words(self.callers), ranks_words(self.others)
        # No call of that name is in the user's line.
        what = call_words(self.call) + (" to compute a metric" if is_in(METRIC_GATHER, self.call.stack) else "")
        if self.ranks == self.others:
            return f"{others} skipped {what}{at}, which {callers} called{under}{since}"
        called = f"{callers} called {what}{at}{under}"
        return f"{called}, which {others} did not{since}"


@once
def shift(view: Timeline, group: str) -> Shift | None:
    """The first shift in a group, as far back as the recorder has entries with stacks; None if there is none.

    A branch in which each side makes the same call from its own line is no shift: later calls are equal again.
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
        if len({call.site for call in here.values()}) > 1 and not _differ_by_root(view, here):
            shift_here = _shift_at(view, aligned, index, tuple(here))
            if shift_here is not _BRANCH:
                return shift_here
    return None


def _differ_by_root(view: Timeline, calls: Mapping[int, Collective]) -> bool:
    """Whether all have made one user's call with a root, in which torch takes a different path on the root."""
    callers = Counter(call.site for call in calls.values())
    with_stacks = [view.with_stack(call) for call in calls.values()]
    # Libraries make different calls with a root from one line: a broadcast of the strategy serves many callers.
    are_users = all(user_frames(inside_trainer(call.stack)) for call in with_stacks)
    places = {tuple((frame.file, frame.line) for frame in call.stack) for call in with_stacks}
    is_same = are_users and len({call.op for call in with_stacks}) == 1 and len(places) == 1
    return is_same and with_stacks[0].op in ROOTED and len(callers) == 2 and min(callers.values()) == 1


@once
def unnoticed_shift(view: Timeline) -> Shift | None:
    """A shift by calls of the user's that were paired with other calls of the same kind, so that nothing diverged.

    None unless all ranks wait: a rank that works may make the missing call yet.
    """
    if not view.all_wait:
        return None
    shifts = (shift(view, group.name) for group in view.groups)
    by_count = (one for one in shifts if one is not None and one.count)
    return next((one for one in by_count if deepest_user_frame(inside_trainer(one.call.stack))), None)


def _condition_of(call: Collective) -> str:
    """The condition on the rank under which a call was made; empty if there is none, or its stack is not known."""
    return next((frame.rank_condition for frame in reversed(call.stack) if frame.rank_condition), "")


# Marks a difference that is only a branch.
_BRANCH = Shift(ranks=(), call=Collective(group="", seq=0, op=""), callers=(), others=(), count=0, frame=None)


def _shift_at(view: Timeline, aligned: dict[int, list[Collective]], index: int, ranks: tuple[int, ...]) -> Shift | None:
    usual = Counter(aligned[rank][index].site for rank in ranks).most_common(1)[0][0]
    calls = {rank: aligned[rank][index] for rank in ranks}
    if shadowing := tuple(rank for rank, call in calls.items() if is_in(JOIN, call.stack)):
        return _shift_by_join(calls, shadowing)
    usually = [rank for rank in ranks if aligned[rank][index].site == usual]
    longest = max(usually, key=lambda rank: len(aligned[rank]))
    before, theirs = aligned[longest][:index], aligned[longest][index:]
    # Some of them may have made a later call more or fewer.
    variants = {tuple(call.site for call in calls): calls for calls in (aligned[rank][index:] for rank in usually)}
    compared = [*variants.values()][:_MOST_VARIANTS]
    is_branch = {
        rank: rank in usually or any(_is_branch(aligned[rank][index:], calls) for calls in compared) for rank in ranks
    }
    few = tuple(rank for rank in ranks if not is_branch[rank])
    if not few:
        return _BRANCH
    many = tuple(rank for rank in ranks if rank not in few)
    is_majority = len(many) > max(Counter(aligned[rank][index].site for rank in few).values())
    own = aligned[few[0]][index:]
    count = _distance(own, theirs)
    if count is None:
        is_one_call = len({aligned[rank][index].site for rank in few}) == 1
        in_loop = _in_loop_left(few, many, own[0], theirs[0], before, is_majority) if is_one_call else None
        if in_loop is not None:
            return in_loop
        return (
            _in_one_call(few, many, own[0], theirs[0], before, are_past=_are_past(view, few, many, before))
            if is_majority
            else _against_habit(aligned, index, ranks, before)
        )
    if any(_distance(aligned[rank][index:], theirs) != count for rank in few):
        return None
    callers, others, call = (few, many, own[0]) if count > 0 else (many, few, theirs[0])
    ranks = few if len(few) < len(many) else _odd_side(call, callers, others, before)
    # The others have called what has always come next.
    instead = theirs[0] if count > 0 else own[0]
    is_by_habit = len(ranks) == len(calls) and instead.site in usual_sites(before, len(before))
    return Shift(
        ranks=callers if is_by_habit else ranks,
        call=call,
        callers=callers,
        others=others,
        count=abs(count),
        frame=deepest_user_frame(call.stack),
        is_at_one_line=len({aligned[rank][index].site for rank in callers}) == 1,
        is_by_habit=is_by_habit,
    )


def _shift_by_join(calls: dict[int, Collective], shadowing: tuple[int, ...]) -> Shift | None:
    """The calls that ranks in torch's ``Join`` do not shadow: those that are not of the joined models."""
    if len({*map(signature, calls.values())}) == 1:
        return _BRANCH
    callers = tuple(rank for rank in calls if rank not in shadowing)
    call = calls[callers[0]] if callers else None
    frame = deepest_user_frame(call.stack) if call is not None else None
    if call is None or frame is None:
        return None
    return Shift(ranks=shadowing, call=call, callers=callers, others=shadowing, count=0, frame=frame)


def _in_loop_left(
    few: tuple[int, ...],
    many: tuple[int, ...],
    own: Collective,
    theirs: Collective,
    before: _Calls,
    is_majority: bool,
) -> Shift | None:
    """The shift if one side has left a loop of the user's, and the other side makes one more call in it."""
    ranks = few if is_majority else tuple(sorted((*few, *many)))
    for call, past, callers, others in ((own, theirs, few, many), (theirs, own, many, few)):
        own_lines, other_lines = (user_frames(inside_trainer(one.stack)) for one in (past, call))
        # All have made their last call in the loop, too.
        was_inside = bool(before) and before[-1].site == call.site and is_in_loop_below(own_lines, other_lines)
        # Without a line of the user's, one is out of all loops; how long this one usually is decides who left it early.
        is_usual = not own_lines and any(one.site == call.site != two.site for one, two in pairwise(before))
        if (was_inside and not is_usual) or loop_left(own_lines, other_lines) is not None:
            frame = deepest_user_frame(call.stack)
            return Shift(ranks=ranks, call=call, callers=callers, others=others, count=0, frame=frame)
    return None


def _are_past(view: Timeline, few: tuple[int, ...], many: tuple[int, ...], before: _Calls) -> bool:
    """Whether some ranks are past where each of the others waits: further down a function, or done with the batch."""
    pairs = [(view.facts[rank], view.facts[other]) for rank in few for other in many]
    if all(_is_after_step_of(here.progress, there.progress) for here, there in pairs):
        return True
    # A call that all have made before may be made again, in the next pass of a loop, which they are ahead in.
    waits = [call for rank in many if (call := view.activities[rank].collective) is not None]
    usual = {call.site for call in before}
    is_new = len(waits) == len(many) and usual.isdisjoint(call.site for call in waits)
    return is_new and all(
        _is_in_one_batch(here.progress, there.progress)
        and is_before(inside_trainer(there.stack), inside_trainer(here.stack))
        and not _are_in_two_arms(inside_trainer(here.stack), inside_trainer(there.stack))
        for here, there in pairs
    )


def _are_in_two_arms(own: tuple[Frame, ...], other: tuple[Frame, ...]) -> bool:
    """Whether one condition has led two stacks to different lines of a function, so that neither is past the other."""
    depth = depth_passed(own, other)
    if depth is None:
        return False
    here, there = ({branch.line: branch.test for branch in stack[depth].branches} for stack in (own, other))
    return any(there.get(line, test) != test for line, test in here.items())


def _is_in_one_batch(here: Progress, there: Progress) -> bool:
    return (here.phase, here.epoch, here.batch_idx) == (there.phase, there.epoch, there.batch_idx)


def _is_after_step_of(here: Progress, there: Progress) -> bool:
    """Whether one rank has done the step of a training batch in which another one is."""
    is_one_batch = _is_in_one_batch(here, there) and here.batch_idx >= 0
    is_in_step = is_in_action(there, ".training_step")
    is_over = is_in_action(here, "on_train_batch_end", "on_train_epoch_end")
    return is_one_batch and is_in_step and is_over


def _in_one_call(
    few: tuple[int, ...],
    many: tuple[int, ...],
    own: Collective,
    theirs: Collective,
    before: _Calls,
    *,
    are_past: bool,
) -> Shift | None:
    """The shift if all wait in the first call that differs, and most of them in the same one."""
    frame, others_frame = deepest_user_frame(own.stack), deepest_user_frame(theirs.stack)
    # A call that is usually made later has been made too early.
    is_usual = any(call.site == own.site for call in before)
    if others_frame is not None and (is_usual or frame is None or are_past):
        return Shift(ranks=few, call=theirs, callers=many, others=few, count=0, frame=others_frame)
    return Shift(ranks=few, call=own, callers=few, others=many, count=0, frame=frame) if frame is not None else None


def _against_habit(
    aligned: dict[int, list[Collective]], index: int, ranks: tuple[int, ...], before: _Calls
) -> Shift | None:
    """The same if both sides have equally many ranks, and one side has called what all have always called here."""
    next_sites = usual_sites(before, index)
    if not next_sites:
        return None
    callers = tuple(rank for rank in ranks if aligned[rank][index].site in next_sites)
    others = tuple(rank for rank in ranks if rank not in callers)
    usual = {call.site for call in before}
    if not callers or not others:
        return None
    # A new call is an extra one; a call that is usually made later has been made too early. A call of the user's in
    # place of a library's is an extra one, too: the library's comes next.
    is_libraries = deepest_user_frame(aligned[callers[0]][index].stack) is None
    new = [
        rank
        for rank in others
        if aligned[rank][index].site not in usual
        or (is_libraries and deepest_user_frame(aligned[rank][index].stack) is not None)
    ]
    call = aligned[new[0] if new else callers[0]][index]
    made, skipped = (tuple(new), callers) if new else (callers, others)
    return Shift(ranks=others, call=call, callers=made, others=skipped, count=0, frame=deepest_user_frame(call.stack))


def usual_sites(before: _Calls, index: int) -> set[str]:
    """The only call site that has followed the last calls so far; empty if there are several or none.

    As many calls back as are needed: a line that logs several values makes the same calls again and again.
    """
    alike: Sequence[int] = range(1, index)
    sites, back = set[str](), 0
    while (back < _CONTEXT or len(sites) > 1) and back < min(index, _MOST_CONTEXT):
        back += 1
        alike = [at for at in alike if at >= back and before[at - back].site == before[index - back].site]
        sites = {before[at].site for at in alike}
    # What has followed longer sequences once may have been chance.
    is_usual = back == _CONTEXT or (back > _CONTEXT and len(alike) > 1)
    return sites if len(sites) == 1 and sites != {""} and is_usual else set()


def _is_branch(own: _Calls, theirs: _Calls) -> bool:
    """Whether both have made the same call from different lines, and later calls are equal again.

    That has to explain at least as many calls as a distance between the two does.
    """
    if len(own) < 2 or len(theirs) < 2 or own[1].site != theirs[1].site or signature(own[0]) != signature(theirs[0]):
        return False
    count = _distance(own, theirs)
    apart = _fits(own[max(count, 0) :], theirs[max(-count, 0) :]) if count is not None else 0
    return _alike(own[1:], theirs[1:]) >= apart


def _distance(own: _Calls, theirs: _Calls) -> int | None:
    """How many more calls the first side has made (negative: fewer), so that later calls match; None if unknown."""
    fitting = [
        (fits, -abs(count), count)
        for count in (*range(1, _MAX_SHIFT + 1), *range(-1, -_MAX_SHIFT - 1, -1))
        if (fits := _fits(own[max(count, 0) :], theirs[max(-count, 0) :]))
    ]
    best: tuple[int, int, int] | None = max(fitting, default=None)
    # If both directions match equally well, it is unknown which side has made the extra calls.
    if best is None or sum(one[:2] == best[:2] for one in fitting) > 1:
        return None
    return best[2]


def _fits(own: _Calls, theirs: _Calls) -> int:
    """How many calls are equal; 0 if one of them is not."""
    pairs = [*zip(own, theirs, strict=False)][:_ENOUGH]
    return len(pairs) if all(one.site == other.site for one, other in pairs) else 0


def _alike(own: _Calls, theirs: _Calls) -> int:
    """How many calls are equal until the first one that is not."""
    pairs = [*zip(own, theirs, strict=False)][:_ENOUGH]
    return next((index for index, (one, other) in enumerate(pairs) if one.site != other.site), len(pairs))


def _odd_side(
    call: Collective, callers: tuple[int, ...], others: tuple[int, ...], before: Iterable[Collective]
) -> tuple[int, ...]:
    """Of two sides of equal size, the one that is out of step; both if nothing decides."""
    if _condition_of(call):
        return callers
    # All have made this call before.
    if any(earlier.site == call.site for earlier in before):
        return others
    return tuple(sorted((*callers, *others)))
