"""Calls of a group that only some ranks have made, as the recorder's past knows them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.code.libraries import JOIN
from lightning_ncclsafe.facts import Collective, Frame
from lightning_ncclsafe.rules.kit.activity import (
    deepest_user_frame,
    is_in,
)
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline, signature
from lightning_ncclsafe.rules.kit.wording import (
    call_words,
    condition_words,
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
    calls = {rank: aligned[rank][index] for rank in ranks}
    if shadowing := tuple(rank for rank, call in calls.items() if is_in(JOIN, call.stack)):
        return _unshadowed(calls, shadowing)
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


def _unshadowed(calls: dict[int, Collective], shadowing: tuple[int, ...]) -> Shift | None:
    """Who has joined early makes the calls of the joined models beside the others, and of no more it knows."""
    if len({*map(signature, calls.values())}) == 1:
        return _BRANCH
    callers = tuple(rank for rank in calls if rank not in shadowing)
    call = calls[callers[0]] if callers else None
    frame = deepest_user_frame(call.stack) if call is not None else None
    if call is None or frame is None:
        return None
    return Shift(ranks=shadowing, call=call, callers=callers, others=shadowing, count=0, frame=frame)


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
    next_sites = usual_sites(before, index)
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


def usual_sites(before: Calls, index: int) -> set[str]:
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
