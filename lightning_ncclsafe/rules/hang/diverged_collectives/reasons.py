"""Diverged collectives whose reason is among the facts: a thread, more passes, a key of some ranks, more calls."""

from lightning_ncclsafe.rules.hang.diverged_collectives import remedies
from lightning_ncclsafe.rules.kit import (
    Evidence,
    Finding,
    Severity,
    Timeline,
    aborted_by_gloo,
    batch_words,
    call_evidence,
    called_by_threads,
    calls_words,
    capitalised,
    clause,
    different_counts,
    ended_process_evidence,
    finding,
    finished_ahead,
    gloo_abort_words,
    location_of,
    monitored_on_some,
    others_wait,
    place_words,
    ranks_words,
    shift,
    where_evidence,
)


def known_reason(view: Timeline) -> Finding | None:
    """The finding about the first of these reasons that applies."""
    return _two_threads(view) or _more_passes(view) or _monitored_key(view) or _finished_ahead(view)


def _two_threads(view: Timeline) -> Finding | None:
    """Two threads call collectives, in an order that differs between ranks."""
    lines = called_by_threads(view)
    if not lines:
        return None
    ranks, line = tuple(lines), next(iter(lines.values()))
    ended, split = aborted_by_gloo(view), view.divergence or view.lost_divergence
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
            *(call_evidence(split) if split is not None else ()),
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
    monitored = monitored_on_some(view)
    if monitored is None:
        return None
    key, having, lacking = monitored
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
