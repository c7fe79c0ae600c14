"""The cause unfinished-rank: one rank still works at the end of the Trainer's function, all others have finished."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Plan,
    Severity,
    Timeline,
    capitalised,
    clause,
    finding,
    hang_rule,
    has_batches_left,
    in_trainer_again,
    is_gone,
    is_in_action,
    joined,
    left_in_order,
    location_of,
    phase_evidence,
    place_words,
    ranks_words,
    stack_evidence,
    verb,
    waiting_sentence,
    where_words,
)

_AT_END = (".on_fit_end", ".on_train_end", ".on_test_end", ".on_predict_end", ".on_predict_epoch_end", "teardown")
_REMEDY_CALL = (
    "Call trainer.fit, validate, test and predict on all ranks: each begins with collectives. Do it on all of them "
    "after fit has returned, or let one rank do it with its own Trainer on one device."
)


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``stop`` if a rank has called the Trainer from within its own call and waits for the others; else ``unknown``."""
    is_again = bool(in_trainer_again(view)) and {*finding.ranks} <= {*view.waiting}
    # What the others have caught may have led them past the call: a fault of a machine, such as a full disk.
    has_caught = any(facts.caught or facts.failed_save for facts in view.facts.values())
    return Plan.STOP if is_again and not has_caught else Plan.UNKNOWN


@hang_rule(
    after="late-at-init",
    follows=("slow-logger",),
    remedy=(
        "If this work is intended, do nothing: the others exit, and it continues. If it never ends, neither does the "
        "job: look at that line, which writes, sends or waits for a thread or process at the end of the run, without "
        "the other ranks."
    ),
    plan=_plan,
)
def unfinished_rank(view: Timeline) -> Iterator[Finding]:
    """Some ranks are still in the Trainer's function after all others have returned from it.

    Symptom:
        Training has ended, most processes are gone or idle, and the job does not end.

    Cause:
        A hook at the end (on_fit_end, teardown), a logger or a checkpoint that one rank alone writes or waits for; a
        call of the Trainer in such a hook, which begins with collectives that nobody joins.

    Remedy:
        Nothing if that work is intended; otherwise look at the line.

    Cannot see:
        Whether the work will end; what a rank does after the Trainer's function.
    """
    if again := in_trainer_again(view):
        yield _another_call(view, again)
        return
    finished, ranks = view.finished, view.working(view.facts)
    # A rank that still has batches will wait for those that have left: that is a different cause.
    if not ranks or len(finished) + len(ranks) < len(view.facts) or has_batches_left(view, ranks):
        return
    text = f"{clause(ranks, 'has|have not finished')}: {where_words(view, ranks[0])}"
    if not finished:
        if gone := _gone_before_the_end(view, ranks):
            ended = f"the {verb(gone, 'process', 'processes')} of {clause(gone, 'has|have ended')}"
            text = f"{text}; {ended}."
            yield finding(view, ranks, text, severity=Severity.WARNING, evidence=stack_evidence(view, ranks))
        return
    left = f"{clause(finished, 'has|have finished and')} {verb(finished, 'leaves', 'leave')}"
    yield finding(
        view,
        ranks,
        f"{text}; {left}.",
        severity=Severity.WARNING,
        confidence=Confidence.CERTAIN,
        evidence=_evidence(view, ranks, finished),
    )


def _evidence(view: Timeline, ranks: tuple[int, ...], finished: tuple[int, ...]) -> Iterator[Evidence]:
    yield from stack_evidence(view, ranks)
    yield from phase_evidence(view, ranks)
    yield Evidence(source="phase", text=f"{capitalised(ranks_words(finished))}: past the end of the Trainer.")


def _gone_before_the_end(view: Timeline, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks whose processes have exited while these inspected ranks are in hooks at the end of the Trainer's call."""
    facts = [view.facts[rank] for rank in ranks]
    if not all(one.inspection is not None and is_in_action(one.progress, *_AT_END) for one in facts):
        return ()
    gone = tuple(rank for rank in view.silent if rank in view.witnesses and is_gone(view, rank))
    return gone if all(left_in_order(view.witnesses[rank]) for rank in gone) else ()


def _another_call(view: Timeline, calls: dict[int, Frame]) -> Finding:
    ranks = tuple(sorted(calls))
    finished = view.besides(calls)
    text = (
        f"{clause(ranks, 'has|have called the Trainer again from within its own call')}, "
        f"{place_words(calls[ranks[0]])}, and {clause(finished, 'has|have not')}: "
        f"{verb(finished, 'it has', 'they have')} finished and {verb(finished, 'leaves', 'leave')}"
    )
    return finding(
        view,
        ranks,
        joined((f"{text}.", waiting_sentence(view))),
        severity=Severity.ERROR,
        location=location_of(calls[ranks[0]]),
        evidence=_evidence(view, ranks, finished),
        remedy=_REMEDY_CALL,
    )
