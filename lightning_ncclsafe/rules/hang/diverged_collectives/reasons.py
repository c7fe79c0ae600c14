"""Diverged collectives whose reason is among the facts: calls of the Trainer, a thread, more passes, a logged key."""

from lightning_ncclsafe.code.libraries import EARLY_STOPPING, MODEL_CHECKPOINT
from lightning_ncclsafe.rules.hang.diverged_collectives import remedies
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Severity,
    Timeline,
    aborted_by_gloo,
    alone_in_trainer,
    at_words,
    batch_words,
    call_evidence,
    called_by_threads,
    calls_words,
    capitalised,
    clause,
    condition_evidence,
    condition_of,
    deepest_user_frame,
    different_counts,
    ended_process_evidence,
    finding,
    finished_ahead,
    gloo_abort_words,
    is_gone,
    is_in,
    location_of,
    others_wait,
    out_of_data_first,
    outside_trainer,
    place_words,
    ranks_words,
    saving_alone,
    shift,
    under_words,
    verb,
    waiting_outside_trainer,
    where_evidence,
    where_words,
    while_others_wait,
)

MONITORS = EARLY_STOPPING | MODEL_CHECKPOINT
"""Callbacks that monitor a logged value."""


def known_reason(view: Timeline) -> Finding | None:
    """The finding about the first of these reasons that applies."""
    if saving_alone(view):
        return None
    return (
        _called_alone(view)
        or _called_before(view)
        or _two_threads(view)
        or _more_passes(view)
        or _monitored_key(view)
        or _finished_ahead(view)
    )


def _called_alone(view: Timeline) -> Finding | None:
    """Some ranks have called the Trainer; the others are in another call of it, or in none, and have no guard."""
    conditions = alone_in_trainer(view)
    if not conditions:
        return None
    ranks, condition = tuple(sorted(conditions)), next(iter(conditions.values()))
    caller = deepest_user_frame(outside_trainer(view.facts[ranks[0]].stack))
    others = view.besides(ranks)
    elsewhere = f" {capitalised(clause(others, 'is|are'))} in another call." if others else ""
    text = (
        f"{clause(ranks, 'has|have called the Trainer alone')}"
        f"{at_words(caller)}, {under_words(condition)}: "
        f"{others_wait(view) or where_words(view, ranks[0])}.{elsewhere}{_silent_words(view)}"
    )
    evidence = where_evidence(view, view.facts)
    return finding(view, ranks, text, location=location_of(caller), evidence=evidence, remedy=remedies.TRAINER)


def _called_before(view: Timeline) -> Finding | None:
    """Between two calls of the Trainer, some ranks call a collective, and the others are already in the next call."""
    stacks = waiting_outside_trainer(view)
    if not stacks:
        return None
    ranks = tuple(sorted(stacks))
    frame = deepest_user_frame(stacks[ranks[0]])
    conditions = [condition for rank in ranks if (condition := condition_of(view, rank))]
    under = f", {under_words(conditions[0])}" if conditions else ""
    text = (
        f"{clause(ranks, 'waits|wait for all ranks')} {place_words(frame)}{under}, outside of the Trainer, which "
        f"the others have called{while_others_wait(view, ranks)}."
    )
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.CERTAIN if len(conditions) == len(ranks) else Confidence.LIKELY,
        location=location_of(frame),
        evidence=(*condition_evidence(view, ranks), *where_evidence(view, view.facts)),
    )


def _silent_words(view: Timeline) -> str:
    """Sentences about the ranks that do not answer; empty if all answer."""
    gone = tuple(rank for rank in view.silent if is_gone(view, rank))
    outside = tuple(rank for rank in view.silent if rank not in gone)
    ended = f" The process of {ranks_words(gone)} has ended." if gone else ""
    away = f"{capitalised(clause(outside, 'does|do'))} not answer, as"
    return ended + (f" {away} {verb(outside, 'a rank', 'ranks')} outside the Trainer." if outside else "")


def _two_threads(view: Timeline) -> Finding | None:
    """Two threads call collectives, in an order that differs between ranks."""
    lines = called_by_threads(view)
    if not lines:
        return None
    ranks, line = tuple(lines), next(iter(lines.values()))
    ended, split = aborted_by_gloo(view), view.any_divergence
    calls = f" {capitalised(calls_words(view, split))} as one." if split is not None else ""
    gone = f" The process of {ranks_words(ended)} has ended, {gloo_abort_words(view, ended)}." if ended else ""
    text = (
        f"{clause(ranks, 'has|have called')} a collective {place_words(line)}, in a different thread from the one "
        f"that trains: the two threads' collectives interleave differently on each rank and do not match."
    )
    return finding(
        view,
        ranks,
        f"{text}{calls}{gone}",
        severity=Severity.ERROR if ended else None,
        location=location_of(line),
        evidence=(
            *call_evidence(split),
            *ended_process_evidence(view, ended),
            *where_evidence(view, view.facts),
        ),
        remedy=remedies.THREADS,
    )


def _more_passes(view: Timeline) -> Finding | None:
    """A rank has made one more backward pass, whose gradients are reduced with something else of the others."""
    counts = different_counts(view) if view.waiting and not view.raised else None
    if counts is None or not counts.is_more:
        return None
    ranks = counts.ranks
    are_all = len(ranks) == len(counts.made)
    more = "different numbers of backward passes" if are_all else "more backward passes than before or than the others"
    text = (
        f"{clause(ranks, 'has|have made')} {more} in {counts.at} ({counts.words}), and gradients are reduced in each: "
        f"{others_wait(view)}."
    )
    return finding(
        view,
        ranks,
        text,
        location=counts.location,
        evidence=(
            Evidence(source="steps", text=f"Backward passes in {counts.at}: {counts.words}."),
            *where_evidence(view, view.facts),
        ),
        remedy=remedies.PASSES,
    )


def _monitored_key(view: Timeline) -> Finding | None:
    """Some ranks wait in a callback that the others skip because they have not logged the key that it monitors."""
    having = tuple(rank for rank in view.waiting if is_in(MONITORS, view.facts[rank].stack))
    lacking = view.besides(having)
    if not having or not lacking or view.raised or view.working(view.facts) or out_of_data_first(view):
        return None
    logged = {rank: {key.name for key in facts.steps.monitored} for rank, facts in view.facts.items()}
    common = set.intersection(*(logged[rank] for rank in having))
    keys = (key for key in view.facts[having[0]].steps.monitored if key.name in common)
    key = next((key for key in keys if all(key.name not in logged[rank] for rank in lacking)), None)
    if key is None:
        return None
    text = (
        f"{clause(having, 'has|have logged')} {key.name!r} in {key.hook}, which a callback "
        f"monitors, and {clause(lacking, 'has|have not')}"
    )
    return finding(
        view,
        having if len(having) <= len(lacking) else lacking,
        f"{text}: {others_wait(view)}.",
        location=key.place,
        evidence=where_evidence(view, view.facts),
        remedy=remedies.MONITORED_KEY,
    )


def _finished_ahead(view: Timeline) -> Finding | None:
    """Calls that only some ranks made were paired with others of the same kind, so nothing differed until the end."""
    ahead = finished_ahead(view)
    first = shift(view, view.divergence.group) if view.divergence is not None else None
    # The first of these calls, with its line, says more.
    if ahead is None or (first is not None and first.is_decided and first.frame is not None):
        return None
    where = batch_words(view.facts[ahead.still[0]].progress)
    text = (
        f"{clause(ahead.ranks, 'has|have')} trained on all batches while {clause(ahead.still, 'is|are still in')} "
        f"{where}, although an epoch has {ahead.batches} on all ranks: in some batch, {ranks_words(ahead.ranks)} made "
        f"fewer calls than {ranks_words(ahead.still)}, and since then, calls have been paired with the wrong ones. "
        f"{capitalised(others_wait(view))}."
    )
    evidence = where_evidence(view, view.facts)
    return finding(view, ahead.odd, text, location="", evidence=evidence, remedy=remedies.PAIRED)
