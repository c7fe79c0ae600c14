"""Diverged collectives that the Flight Recorder shows: different calls under one number."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.facts.wording import clause
from lightning_ncclsafe.rules.hang.diverged_collectives import remedies
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Divergence,
    Finding,
    Severity,
    Shift,
    Timeline,
    call_evidence,
    call_location,
    callers_and_aborted,
    calls_words,
    capitalised,
    condition_evidence,
    culprits,
    deepest_user_frame,
    ended_process_evidence,
    finding,
    gloo_abort_words,
    group_words,
    inside_trainer,
    is_before,
    is_gone,
    joined,
    location_of,
    others_wait,
    out_of_step,
    ranks_words,
    shift,
    stack_of,
    under_rank_condition,
    was_at_words,
    where_evidence,
    where_words,
)
from lightning_ncclsafe.rules.kit.caught_exceptions import (
    beyond_try,
    caught_by,
    continued_after_exception,
    skipped_at,
    skipped_words,
)
from lightning_ncclsafe.rules.kit.frames import first_user_frame
from lightning_ncclsafe.rules.kit.shifts import usual_sites
from lightning_ncclsafe.rules.kit.waits import condition_of


def mismatch(view: Timeline, split: Divergence) -> Finding:
    """Ranks called different collectives under one number; with the first call that only some made, if it is known."""
    every, ended = callers_and_aborted(view, split), tuple(rank for rank in view.silent if is_gone(view, rank))
    ranks, why, conditions = culprits(view, split), out_of_step(view, every), under_rank_condition(view, every)
    went_on, skipped = _continuation(view, split, ranks)
    first = shift(view, split.group)
    # Ranks in a new call under a condition on the rank have called that, rather than skipped what others called.
    is_alone = (
        first is not None
        and first.ranks == first.others
        and conditions.keys() >= {*first.ranks}
        and all(_is_new(view, split, rank) for rank in ranks)
    )
    # Without a majority, an exception shows which side it took past the other's call.
    is_past = first is not None and 2 * len(first.ranks) >= len(split.calls) and bool(went_on or skipped)
    if first is not None and not ended and not is_alone and not is_past:
        return _shifted(view, split, first)
    text = f"{calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    gone = f"The process of {ranks_words(ended)} has ended, {gloo_abort_words(view, ended)}." if ended else ""
    where = f"{capitalised(ranks_words(ranks[:1]))} {_is_at_words(view, ranks[0])}"
    # The difference is observed. Which side is out of step is concluded, unless the source shows it; so is the line, if
    # these ranks' call is not made by the user's code.
    called = [call for rank, call in split.calls.items() if rank in ranks]
    is_line_concluded = any(call.site and deepest_user_frame(call.stack) is None for call in called)
    is_concluded = bool(ended) or (bool(why or is_line_concluded) and not conditions)
    is_guess = (
        (went_on is not None and 2 * len(ranks) >= len(split.calls))
        or _is_any_line(view, split, ranks)
        or _may_have_left_out(view, split, ranks)
    )
    lines = [location_of(went_on)]
    if not is_alone:
        shifted_at = first.frame if first is not None and not {*first.ranks}.isdisjoint(ranks) else None
        lines += [location_of(shifted_at), divergence_location(view, split, ranks)]
    lines.append(call_location(view, (*ranks, *split.calls)))
    return finding(
        view,
        ranks,
        joined(
            (
                f"{text}: {_outcome_words(view, split)}.",
                gone,
                f"{where}{f', {why[ranks[0]]}' if ranks[0] in why else ''}.",
                skipped,
            )
        ),
        severity=Severity.ERROR if ended else None,
        confidence=Confidence.LIKELY if is_concluded or is_guess else Confidence.CERTAIN,
        location=next(filter(None, lines), ""),
        evidence=(
            *call_evidence(split),
            *ended_process_evidence(view, ended),
            *condition_evidence(view, ranks),
            *where_evidence(view, split.calls),
        ),
        remedy=remedies.same_calls(view),
    )


def _is_any_line(view: Timeline, split: Divergence, ranks: tuple[int, ...]) -> bool:
    """Whether nothing decides between the ranks, nor between the lines of the user's at which they made their calls.

    A line that is new to all ranks decides if the others' is not: there they took different paths, whoever is right.
    """
    if len(ranks) < len(split.calls) or under_rank_condition(view, split.calls):
        return False
    lines = {call.site: deepest_user_frame(call.stack) for call in split.calls.values() if call.site}
    known = {one.site for made in view.sequences(split.group).values() for one in made if one.seq < split.seq}
    new = [site for site in lines if site not in known]
    return len({frame for frame in lines.values() if frame is not None}) > 1 and len(new) != 1


def _may_have_left_out(view: Timeline, split: Divergence, ranks: tuple[int, ...]) -> bool:
    """Whether these ranks are further down a function than the others, whose call they may have left out.

    The recorder's call sites show whether they have; without them, they may also have made a call more.
    """
    if any(call.site for call in split.calls.values()) or under_rank_condition(view, split.calls):
        return False
    stacks = {rank: inside_trainer(call.stack or stack_of(view, rank)) for rank, call in split.calls.items()}
    others = [stack for rank, stack in stacks.items() if rank not in ranks]
    return any(is_before(other, stacks[rank]) for rank in ranks if rank in stacks for other in others)


def _is_new(view: Timeline, split: Divergence, rank: int) -> bool:
    """Whether a rank has not made its call from there before, as far as the recorder shows."""
    call = split.calls.get(rank)
    made = view.sequences(split.group).get(rank, ())
    return call is not None and not any(one.site == call.site and one.seq < call.seq for one in made)


def _shifted(view: Timeline, split: Divergence, first: Shift) -> Finding:
    """The recorder still has the first call that only some ranks have made."""
    later = f"{calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    return finding(
        view,
        first.ranks,
        joined((f"{first.words()}.", f"{capitalised(later)}: {_outcome_words(view, split)}.")),
        # What follows is the same again, and shows how far they are first.
        confidence=Confidence.CERTAIN if first.count and _is_sure(first) and first.frame else Confidence.LIKELY,
        location=location_of(first.frame) or call_location(view, first.ranks),
        evidence=(*call_evidence(split), *where_evidence(view, split.calls)),
        remedy=remedies.same_calls(view),
    )


def _is_sure(first: Shift) -> bool:
    """Whether both are known: who is out of step, and at which line."""
    return first.is_decided and first.is_at_one_line and not first.is_by_habit


def _outcome_words(view: Timeline, split: Divergence) -> str:
    """What became of different calls under one number; NCCL compares nothing, and may complete them with each other."""
    if not all(call.completed for call in split.calls.values()):
        return "these can never complete together"
    waits = others_wait(view)
    return f"these have completed with each other, so their results are wrong{f'; {waits}' if waits else ''}"


def unnoticed(view: Timeline, first: Shift) -> Finding:
    """Calls that only some ranks have made completed with other calls of the others, which are of the same kind."""
    text = f"{first.words()}, and each call has completed with another one of its kind"
    return finding(
        view,
        first.ranks,
        f"{text}. {capitalised(others_wait(view))}.",
        confidence=Confidence.CERTAIN if _is_sure(first) else Confidence.LIKELY,
        location=location_of(first.frame),
        evidence=where_evidence(view, view.facts),
        remedy=remedies.same_calls(view),
    )


def _is_at_words(view: Timeline, rank: int) -> str:
    """Where a rank is, or was until its connections broke: ``"is in Net.on_fit_end at …"``."""
    is_there = rank in view.facts and view.facts[rank].exception is None
    return f"is {where_words(view, rank)}" if is_there else f"was {was_at_words(view, rank)}"


def _continuation(view: Timeline, split: Divergence, ranks: tuple[int, ...]) -> tuple[Frame | None, str]:
    """The line of an exception that took these ranks past what the others called, and a sentence about it; or None."""
    if condition_of(view, ranks[0]) or len(ranks) == len(split.calls):
        return None, ""
    caught = next((one for one in caught_by(view, ranks[0]) if not one.thread), None)
    if caught is not None and continued_after_exception(view, ranks[:1]):
        return skipped_at(caught), ""
    beyond, frame = beyond_try(view, split.calls)
    if frame is None or not set(ranks) <= set(beyond):
        return None, ""
    others = [rank for rank in split.calls if rank not in beyond]
    return frame, skipped_words(frame, clause(others, "waits|wait"))


def divergence_location(view: Timeline, split: Divergence, ranks: Iterable[int]) -> str:
    """The user's line to look at, according to the recorder; empty if unknown.

    If the call of these ranks has been made at this place before, by any rank, or the others have called what has
    always come next, these ranks have not made an extra call: they have skipped the call of the others.
    """
    own = [call for rank, call in split.calls.items() if rank in {*ranks}]
    others = [call for rank, call in split.calls.items() if rank not in {*ranks}]
    sequences = view.sequences(split.group).values()
    earlier = {c.site for calls in sequences for c in calls if c.seq < split.seq}
    before = max(([c for c in calls if c.seq < split.seq] for calls in sequences), key=len, default=[])
    usual = usual_sites(before, len(before))
    is_skipped = bool(usual) and {c.site for c in others} == usual and usual.isdisjoint(c.site for c in own)
    calls = [*others, *own] if is_skipped else sorted([*own, *others], key=lambda call: call.site in earlier)
    return location_of(first_user_frame(call.stack for call in calls if call.site))
