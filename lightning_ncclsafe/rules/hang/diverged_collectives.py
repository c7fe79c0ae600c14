"""The cause diverged-collectives: ranks called different collectives under the same number."""

from collections import defaultdict
from collections.abc import Iterable

from lightning_ncclsafe.facts import Frame, JobFacts
from lightning_ncclsafe.findings import Confidence, Finding, Severity
from lightning_ncclsafe.rules.activity import Kind, deepest_user_frame, trainer_start
from lightning_ncclsafe.rules.caught import (
    caught_by,
    has_gone_on,
    past_aborted,
    raised_at,
    skipped_words,
    skips_handled,
)
from lightning_ncclsafe.rules.divergences import (
    alone_in_trainer,
    apart,
    call_evidence,
    calls_words,
    condition_of,
    culprits,
    where_evidence,
)
from lightning_ncclsafe.rules.garbled import is_garbled
from lightning_ncclsafe.rules.overruns import aborted
from lightning_ncclsafe.rules.positions import ended_first
from lightning_ncclsafe.rules.sentences import location, others_wait, place_words, severity, standing
from lightning_ncclsafe.rules.sharded import gathering_alone
from lightning_ncclsafe.rules.timeline import Divergence, Timeline, timeline
from lightning_ncclsafe.rules.wording import (
    capitalised,
    condition_words,
    group_words,
    joined,
    location_of,
    ranks_words,
    verb,
)

_REMEDY = (
    "Make every rank call the same collectives in the same order: no self.log(sync_dist=True), metric.compute(), "
    "all_gather, barrier, trainer.log_dir or save_checkpoint under a condition on the rank or on the data, the same "
    "keys in log_dict on all ranks, and the same branches of the model in forward."
)
_REMEDY_ALONE = (
    "Call trainer.fit, validate, test and predict on all ranks: each begins with collectives. For work of one rank "
    "alone, make a Trainer of its own with devices=1 and no distributed strategy, once the other ranks have left."
)


def diverged_collectives(job: JobFacts) -> Iterable[Finding]:
    """Ranks of a group called different collectives, so that none of them can complete.

    Symptom:
        A timeout in which ranks report different operations or sizes for one sequence number, or nothing at all.

    Cause:
        A collective under a condition that holds on some ranks only: on the rank, on the data, in an except block.

    Remedy:
        Make every rank call the same collectives in the same order.

    Cannot see:
        Where older collectives were called: only the present line of each rank is known, and the recorder's past is
        limited. Before Python 3.12, an exception that the user's code has caught without logging it, and without its
        having come out of a collective or a hook.
    """
    view = timeline(job)
    # A rank that runs a spread model alone has diverged as well: that is told as rank-zero-only-work.
    if ended_first(view) or gathering_alone(view) or not all(_is_garbled(view, rank) for rank in view.raised):
        return
    if view.divergence is not None:
        yield _mismatch(view, view.divergence)
    elif gone_on := past_aborted(view):
        yield _gone_on(view, gone_on)
    elif crossed := _crossed(view):
        yield _crossing(view, tuple(apart(view)) or crossed)
    elif alone := _after_the_others(view):
        yield _crossing(view, alone)
    elif any(alone_in_trainer(view)):
        yield _alone(view, *alone_in_trainer(view))
    elif sites := _other_call_sites(view):
        yield _call_sites(view, sites)


def _is_garbled(view: Timeline, rank: int) -> bool:
    """Whether a rank has raised because it took another collective's numbers for the length of its objects."""
    error = view.facts[rank].exception
    return error is not None and is_garbled(error)


def _mismatch(view: Timeline, split: Divergence) -> Finding:
    ranks = culprits(view, split)
    text = f"{calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    condition = condition_of(view, ranks[0])
    under = f", under {condition_words(condition)}" if condition else ""
    stands = f"{capitalised(ranks_words(ranks[:1]))} stands {standing(view, ranks[0])}{under}."
    went_on, skipped = _why_it_went_on(view, split, ranks)
    # That they called different ones is certain; who of as many is to blame is not, without a condition on the rank.
    is_guess = went_on is not None and 2 * len(ranks) >= len(split.calls)
    return Finding(
        rule="diverged-collectives",
        severity=severity(view.job),
        confidence=Confidence.LIKELY if is_guess else Confidence.CERTAIN,
        summary=joined((f"{capitalised(text)}: these can never complete together.", stands, skipped)),
        ranks=ranks,
        location=location_of(went_on) or location(view, ranks),
        evidence=(*call_evidence(split), *where_evidence(view, split.calls)),
        remedy=_REMEDY,
    )


def _why_it_went_on(view: Timeline, split: Divergence, ranks: tuple[int, ...]) -> tuple[Frame | None, str]:
    """Where an exception took these ranks past what the others called, and what is said of it; None without one."""
    if condition_of(view, ranks[0]) or len(ranks) == len(split.calls):
        return None, ""
    caught = next((one for one in caught_by(view, ranks[0]) if not one.thread), None)
    if caught is not None and has_gone_on(view, ranks[:1]):
        return raised_at(caught), ""
    beyond, frame = skips_handled(view, split.calls)
    if frame is None or not set(ranks) <= set(beyond):
        return None, ""
    others = [rank for rank in split.calls if rank not in beyond]
    return frame, skipped_words(frame, f"{ranks_words(others)} {verb(others, 'waits', 'wait')}")


def _gone_on(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """Gloo has ended a rank in a call that these have left out: it was sent what they called next."""
    ended = aborted(view)
    own = deepest_user_frame(view.witnesses[ended[0]].stack)
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} gone on after an exception, past a collective that "
        f"{ranks_words(ended)} {verb(ended, 'was', 'were')} in{f' {place_words(own)}' if own else ''}: gloo has ended "
        f"{verb(ended, 'its process', 'their processes')}, as it does where more is sent than there is room for."
    )
    caught = next((one for one in caught_by(view, ranks[0]) if not one.thread), None)
    return Finding(
        rule="diverged-collectives",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        summary=capitalised(text),
        ranks=ranks,
        location=location_of(raised_at(caught)) if caught is not None else "",
        evidence=tuple(where_evidence(view, ranks)),
        remedy=_REMEDY,
    )


def _crossed(view: Timeline) -> tuple[int, ...]:
    """Ranks that others wait for and that wait themselves, elsewhere: the wait is a circle."""
    if view.working(view.facts) or any(facts.exception for facts in view.facts.values()):
        return ()
    return tuple(rank for rank in view.behind if view.activities[rank].waits_for_peers)


def _after_the_others(view: Timeline) -> tuple[int, ...]:
    """Ranks that wait under a condition on the rank, and all for whom they wait have finished."""
    have_finished = all(view.activities[rank].kind is Kind.FINISHED for rank in view.behind)
    return tuple(rank for rank in view.waiting if condition_of(view, rank)) if view.behind and have_finished else ()


def _crossing(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    why = apart(view).get(ranks[0], "")
    text = f"{ranks_words(ranks)} {verb(ranks, 'waits', 'wait')} elsewhere than the others{f', {why}' if why else ''}"
    return Finding(
        rule="diverged-collectives",
        severity=severity(view.job),
        confidence=Confidence.LIKELY,
        summary=f"{capitalised(text)}: {others_wait(view, ())}.",
        ranks=ranks,
        location=location(view, ranks),
        evidence=tuple(where_evidence(view, view.facts)),
        remedy=_REMEDY,
    )


def _alone(view: Timeline, ranks: tuple[int, ...], condition: str) -> Finding:
    """The others are in no call of the Trainer, so there is no guard that would answer."""
    stack = view.facts[ranks[0]].stack
    called = deepest_user_frame(stack[: trainer_start(stack)])
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} called the Trainer alone, under "
        f"{condition_words(condition)}: {others_wait(view, ()) or standing(view, ranks[0])}. "
        f"{capitalised(ranks_words(view.silent))} {verb(view.silent, 'does', 'do')} not answer, as "
        f"{verb(view.silent, 'a rank', 'ranks')} outside the Trainer."
    )
    return Finding(
        rule="diverged-collectives",
        severity=severity(view.job),
        confidence=Confidence.LIKELY,
        summary=capitalised(text),
        ranks=ranks,
        location=location_of(called),
        evidence=tuple(where_evidence(view, view.facts)),
        remedy=_REMEDY_ALONE,
    )


def _other_call_sites(view: Timeline) -> tuple[int, ...]:
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


def _call_sites(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    text = f"{ranks_words(ranks)} joined the same collective from another place than the other ranks"
    return Finding(
        rule="diverged-collectives",
        severity=severity(view.job),
        confidence=Confidence.LIKELY,
        summary=f"{capitalised(text)}, {standing(view, ranks[0])}: {others_wait(view, ())}.",
        ranks=ranks,
        location=location(view, ranks),
        evidence=tuple(where_evidence(view, view.facts)),
        remedy=_REMEDY,
    )
