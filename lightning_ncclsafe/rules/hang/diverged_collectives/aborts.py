"""Diverged collectives that ended a rank: gloo aborted its process, or it raised for data of another collective."""

from lightning_ncclsafe.facts import LoggedKey
from lightning_ncclsafe.rules.hang.diverged_collectives import remedies
from lightning_ncclsafe.rules.hang.diverged_collectives.calls import mismatch
from lightning_ncclsafe.rules.hang.diverged_collectives.reasons import MONITORS
from lightning_ncclsafe.rules.kit import (
    CallBySize,
    Finding,
    Severity,
    Timeline,
    aborted_by_gloo,
    aborted_elsewhere,
    aborted_model_run,
    aborted_words,
    at_words,
    batch_words,
    call_by_size,
    call_location,
    call_words,
    capitalised,
    caught_by,
    clause,
    condition_evidence,
    continued_before_abort,
    deepest_user_frame,
    ended_process_evidence,
    error_words,
    exception_evidence,
    exception_place,
    finding,
    gloo_abort_words,
    is_in,
    joined,
    location_of,
    out_of_step,
    place_words,
    ranks_words,
    same_purpose,
    skipped_at,
    stack_of,
    verb,
    was_at_words,
    where_evidence,
    while_others_wait,
)


def after_abort(view: Timeline) -> Finding | None:
    """What led to the abort, if ranks were in different calls."""
    if continued := continued_before_abort(view):
        return _continued(view, continued)
    if aborted_model_run(view) is None and (ended := aborted_elsewhere(view)):
        return _in_different_calls(view, ended)
    if (sized := call_by_size(view)) is not None and aborted_model_run(view) is None:
        return _by_size(view, sized)
    lost = view.lost_divergence
    return mismatch(view, lost) if lost is not None and same_purpose(view, lost) is False else None


def _in_different_calls(view: Timeline, ended: tuple[int, ...]) -> Finding:
    """The user's lines show that the aborted process was not in the call that the others were in."""
    others = tuple(sorted(view.facts))
    every = (*ended, *others)
    key = _key_never_logged(view, ended, others)
    reasons = out_of_step(view, every)
    ranks = tuple(reasons) or (min(ended, others, key=len) if len(ended) != len(others) else tuple(sorted(every)))
    why = f"{capitalised(clause(ranks, 'was|were there'))} {reasons[ranks[0]]}." if reasons else ""
    if key is not None:
        ranks = ended if len(ended) <= len(others) else others
        why = f"A callback monitors {key.name!r}, which {clause(others, 'has|have never logged')}."
    text = (
        f"{aborted_words(view, ended)} {was_at_words(view, ended[0])}, "
        f"{gloo_abort_words(view, ended)}, while {clause(others, 'was|were')} "
        f"{was_at_words(view, others[0])}: these are different collectives."
    )
    return finding(
        view,
        ranks,
        joined((text, why)),
        severity=Severity.ERROR,
        location=key.place if key is not None else call_location(view, ranks) or call_location(view, every),
        evidence=(
            *ended_process_evidence(view, ended),
            *condition_evidence(view, ranks),
            *where_evidence(view, others),
        ),
        remedy=remedies.same_calls(view) if key is None else remedies.MONITORED_KEY,
    )


def _by_size(view: Timeline, sized: CallBySize) -> Finding:
    """The sizes show which call the aborted process was in, and that the others were in a different one."""
    ended = aborted_by_gloo(view)
    have_skipped = 2 * len(sized.senders) <= len(view.facts) + len(ended)
    ranks = sized.senders if have_skipped else ended
    text = (
        f"{aborted_words(view, ended)}, {gloo_abort_words(view, ended)}. "
        f"{capitalised(clause(sized.senders, 'sends|send'))} that many bytes in {call_words(sized.sent)}, and the room "
        f"was for {call_words(sized.call)} {place_words(sized.frame)}: these are different collectives. "
        f"{capitalised(clause(ranks, 'has|have'))} probably {'skipped' if have_skipped else 'added'} the latter."
    )
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR,
        location=location_of(sized.frame),
        evidence=(*ended_process_evidence(view, ended), *where_evidence(view, sized.senders)),
        remedy=remedies.same_calls(view),
    )


def _key_never_logged(view: Timeline, ended: tuple[int, ...], others: tuple[int, ...]) -> LoggedKey | None:
    """The only monitored key that the others have never logged, if the aborted ranks were in such a callback."""
    if not all(is_in(MONITORS, stack_of(view, rank)) for rank in ended):
        return None
    keys = {key.name: key for rank in others for key in view.facts[rank].steps.unmonitored}
    lacked = [key for key in keys.values() if all(key in view.facts[rank].steps.unmonitored for rank in others)]
    return lacked[0] if len(lacked) == 1 else None


def _continued(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """These ranks skipped the aborted process's call after an exception, and sent it the data of their next call."""
    ended = aborted_by_gloo(view)
    frame = deepest_user_frame(view.witnesses[ended[0]].stack)
    text = (
        f"{clause(ranks, 'continued after an exception and skipped a collective that')} "
        f"{clause(ended, 'was|were in')}{at_words(frame)}: gloo ended "
        f"{verb(ended, 'its process', 'their processes')}, as it does when a process is sent more than it has room for."
    )
    caught = next((error for error in caught_by(view, ranks[0]) if not error.thread), None)
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR,
        location=location_of(skipped_at(caught)) if caught is not None else "",
        evidence=where_evidence(view, ranks),
    )


def misread_sizes(view: Timeline) -> Finding:
    """A call of ``torch.distributed`` has completed with other calls, and took their data for a size."""
    ranks = view.raised
    facts = view.facts[ranks[0]]
    frame = exception_place(facts)
    assert facts.exception is not None
    text = (
        f"{ranks_words(ranks)} raised {error_words(facts.exception)}{at_words(frame)}, "
        f"{batch_words(facts.progress)}{while_others_wait(view, ranks)}: no rank has sent this size, so ranks have "
        "called different collectives, which have completed with each other."
    )
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR,
        location=location_of(frame),
        evidence=(*exception_evidence(facts), *where_evidence(view, view.facts)),
        remedy=remedies.same_calls(view),
    )
