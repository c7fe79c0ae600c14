"""Diverged collectives that only the stacks show: ranks wait in different places."""

from collections import defaultdict
from collections.abc import Iterable

from lightning_ncclsafe.code.libraries import BACKWARD, DDP, SHARDING
from lightning_ncclsafe.facts import Frame, RankFacts
from lightning_ncclsafe.rules.hang.diverged_collectives import remedies
from lightning_ncclsafe.rules.kit import (
    Confidence,
    DifferentWaits,
    Evidence,
    Finding,
    Kind,
    Timeline,
    apart_words,
    call_location,
    called_at,
    capitalised,
    clause,
    condition_evidence,
    condition_of,
    deepest_user_frame,
    depth_passed,
    different_waits,
    finding,
    group_words,
    how_we_know,
    in_own_call,
    inside_trainer,
    is_in,
    joined,
    location_of,
    minority,
    open_collectives,
    others_wait,
    out_of_step,
    place_words,
    positions,
    ranks_by,
    ranks_words,
    signature,
    stack_of,
    under_rank_condition,
    wait_words,
    waits_for_silent_device,
    where_evidence,
    where_words,
)

_CALLS = 4
_FEWER_BATCHES = "Fewer batches on some ranks than on others would look the same: compare the loaders' lengths."


def waits_elsewhere(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """These ranks wait elsewhere than the others; if no others wait, those in the less common calls are meant."""
    few = _in_calls_of_few(view) if ranks == view.waiting else ranks
    why = out_of_step(view, view.waiting).get(few[0], "")
    text = f"{clause(few, 'waits|wait in a different place from the others')}{f', {why}' if why else ''}"
    return _finding(view, few, text, location=call_location(view, (*few, *ranks)))


def _in_calls_of_few(view: Timeline) -> tuple[int, ...]:
    """The waiting ranks that are not in the call that most of them wait in; all if there is none."""
    calls = {rank: view.activities[rank].collective for rank in view.waiting}
    numbers = {rank: (call.group, call.seq) if call is not None else None for rank, call in calls.items()}
    return minority(ranks_by(numbers).values()) or view.waiting


def waits_for_none(view: Timeline) -> Finding | None:
    """The places where ranks wait show that they do not wait for each other."""
    if conditioned := _waiting_for_finished(view) or _waiting_apart(view):
        return waits_elsewhere(view, conditioned)
    if finished := _finished_early(view):
        where = place_words(called_at(view, view.waiting[0]))
        return _finding(
            view,
            finished,
            f"{clause(finished, 'has|have finished without')} what is called {where}",
            location=call_location(view, view.waiting),
            evidence=(*condition_evidence(view, view.waiting), *how_we_know(view, view.facts)),
        )
    if (apart := _different_numbers(view)) is not None:
        return apart
    if ranks := _different_call_sites(view):
        text = f"{ranks_words(ranks)} joined the same collective from a different place than the other ranks"
        return _finding(view, ranks, f"{text}, {where_words(view, ranks[0])}")
    return None


def _waiting_for_finished(view: Timeline) -> tuple[int, ...]:
    """Ranks that wait under a condition on the rank for ranks that have all finished."""
    if not view.behind or not {*view.behind} <= {*view.finished}:
        return ()
    return tuple(rank for rank in view.waiting if condition_of(view, rank))


def _waiting_apart(view: Timeline) -> tuple[int, ...]:
    """Ranks that wait under a condition on the rank while all wait, some of them for devices that do not answer.

    Empty if one of them waits in the same call as a rank outside: then it only reads a result there.
    """
    is_unread = any(waits_for_silent_device(view.facts[rank]) for rank in view.waiting)
    if not is_unread or not view.all_wait:
        return ()
    apart = tuple(sorted(under_rank_condition(view, view.waiting)))
    own, others = (
        {(call.group, call.seq, signature(call)) for rank in ranks if (call := view.activities[rank].collective)}
        for ranks in (apart, view.waiting_besides(apart))
    )
    return apart if own.isdisjoint(others) else ()


def _finished_early(view: Timeline) -> tuple[int, ...]:
    """The minority that has finished while all others wait at one line of the user's code."""
    have_finished = {*view.behind} <= {*view.finished}
    if not have_finished or 2 * len(view.behind) >= len(view.facts) or {*view.behind, *view.waiting} != {*view.facts}:
        return ()
    inside = (inside_trainer(view.facts[rank].stack) for rank in view.waiting)
    lines = {deepest_user_frame(stack) for stack in inside}
    return view.behind if len(lines) == 1 and None not in lines else ()


def _different_call_sites(view: Timeline) -> tuple[int, ...]:
    """Ranks that called the same collective from a different function than most did."""
    functions: dict[int, tuple[str, str]] = {}
    for rank in view.waiting:
        doing = view.activities[rank]
        # With several outstanding, the stack shows nothing about the oldest.
        is_sole = len([*open_collectives(view.facts[rank])]) == 1 and not doing.on_device
        if doing.kind is not Kind.COLLECTIVE or doing.frame is None or not is_sole:
            return ()
        functions[rank] = doing.frame.file, doing.frame.function
    sites = ranks_by(functions)
    if len(sites) < 2 or not any(view.joined(group) for group in view.groups):
        return ()
    most = max(sites.values(), key=len)
    few = tuple(rank for who in sites.values() if who is not most for rank in who)
    return tuple(sorted(few if len(few) < len(most) else (*few, *most)))


def _different_numbers(view: Timeline) -> Finding | None:
    """All ranks wait at one place, for devices that do not answer, and have made different numbers of calls before."""
    places = {(*inside_trainer(facts.stack), *_point(facts)) for facts in view.facts.values()}
    if view.silent or len(places) != 1 or not all(map(waits_for_silent_device, view.facts.values())):
        return None
    # How far the model's own threads are in it does not show in the stack.
    if any(is_in(BACKWARD | DDP | SHARDING, facts.stack[-1:]) for facts in view.facts.values()):
        return None
    calls: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, facts in sorted(view.facts.items()):
        for group in facts.unrecorded:
            if group.backend.startswith("nccl") and group.calls >= 0:
                calls[group.name][rank] = group.calls
    for name, counts in sorted(calls.items()):
        by_count = ranks_by(counts)
        if len(by_count) > 1 and sum(map(len, by_count.values())) == len(view.facts):
            numbers = apart_words(f"{count:,} on {ranks_words(who)}" for count, who in by_count.items())
            ranks = minority(by_count.values()) or tuple(view.facts)
            text = (
                f"at the same point of the training, ranks have called different numbers of collectives of "
                f"{group_words(name)} ({numbers}), so calls have been paired with the wrong ones"
            )
            return _finding(view, ranks, text, location="")
    return None


def _point(facts: RankFacts) -> tuple[object, ...]:
    progress = facts.progress
    return progress.phase, progress.epoch, progress.batch_idx, progress.global_step


def _finding(
    view: Timeline,
    ranks: tuple[int, ...],
    text: str,
    *,
    location: str | None = None,
    evidence: Iterable[Evidence] | None = None,
) -> Finding:
    return finding(
        view,
        ranks,
        f"{text}: {others_wait(view)}.",
        location=location,
        evidence=where_evidence(view, view.facts) if evidence is None else evidence,
    )


def inspected_waits(view: Timeline) -> Finding | None:
    """Ranks inspected from outside all wait, and not in the same call."""
    waits = different_waits(view)
    if waits is None:
        return None
    calls = "; ".join(
        f"{clause(who, 'waits|wait in')} {wait_words(view, who[0])} "
        f"{place_words(view.activities[who[0]].place)}".rstrip()
        for who in waits.calls[:_CALLS]
    )
    more = sum(map(len, waits.calls[_CALLS:]))
    why = f"{capitalised(clause(waits.ranks, 'is|are'))} {waits.why}." if waits.why else ""
    is_in_loop = any(position.stage >= 0 for position in positions(view).values())
    lengths = [facts.trainer.batches if facts.trainer is not None else None for facts in view.facts.values()]
    are_even = None not in lengths and len({*lengths}) == 1
    frame = waits.frame or _line_passed(view, waits)
    in_own = [rank for rank in (*waits.ranks, *view.waiting) if in_own_call(view, rank)]
    return finding(
        view,
        waits.ranks,
        joined(
            (
                f"no rank that was seen is at work, and they wait in different calls: {calls}"
                f"{f'; {more} more wait elsewhere' if more else ''}.",
                why,
                _FEWER_BATCHES if is_in_loop and not waits.why and not are_even else "",
            )
        ),
        # After a lost connection, some ranks have left a call that others are still in.
        confidence=Confidence.LIKELY if waits.why and not view.job.elsewhere else Confidence.POSSIBLE,
        location=location_of(frame) or call_location(view, in_own or waits.ranks),
        evidence=(*condition_evidence(view, waits.ranks), *where_evidence(view, view.facts)),
        remedy=remedies.EXCEPT_BLOCK if waits.frame is not None else remedies.same_calls(view),
    )


def _line_passed(view: Timeline, waits: DifferentWaits) -> Frame | None:
    """The line at which the others wait and which the ranks out of step are past, in the same function; else None."""
    others = [rank for rank in view.waiting if rank not in waits.ranks]
    if not others or waits.why:
        return None
    own, other = (inside_trainer(stack_of(view, rank)) for rank in (waits.ranks[0], others[0]))
    depth = depth_passed(own, other)
    return deepest_user_frame(other[depth:]) if depth is not None else None
