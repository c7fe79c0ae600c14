"""The cause diverged-collectives: ranks called different collectives under the same number.

What shows that is divided by where it is seen: ``reasons`` has reasons among the facts, ``calls`` the Flight Recorder's
entries, ``aborts`` a process that gloo has aborted or an exception, ``waits`` the stacks alone.
"""

from collections.abc import Iterator

from lightning_ncclsafe.rules.hang.diverged_collectives import remedies
from lightning_ncclsafe.rules.hang.diverged_collectives.aborts import after_abort, misread_sizes
from lightning_ncclsafe.rules.hang.diverged_collectives.calls import mismatch, unnoticed
from lightning_ncclsafe.rules.hang.diverged_collectives.reasons import known_reason
from lightning_ncclsafe.rules.hang.diverged_collectives.waits import inspected_waits, waits_elsewhere, waits_for_none
from lightning_ncclsafe.rules.kit import (
    Finding,
    Plan,
    Timeline,
    all_garbled,
    as_concluded,
    circle_of_p2p,
    decision,
    gathering_alone,
    hang_rule,
    has_misread_sizes,
    left_loop,
    out_of_data_first,
    out_of_step,
    sole_receiver,
    unnoticed_shift,
    with_decision,
)


@hang_rule(
    after="diverged-log-keys",
    remedy=remedies.SAME_CALLS,
    follows=(
        "different-trainer-settings",
        "stopped-early",
        "checkpoint-skipped-barrier",
        "crossed-groups",
        "diverged-log-keys",
        "mismatched-collective",
        "skipped-step",
        "unfinished-rank",
        "unused-parameters",
    ),
    reads_exceptions=True,
    plan=Plan.STOP,
    is_mutual=True,
)
def diverged_collectives(view: Timeline) -> Iterator[Finding]:
    """Ranks of a process group called different collectives, so none of them can complete.

    Symptom:
        A timeout in which ranks report different OpType or NumelIn for the same SeqNum, "Detected mismatch between
        collectives on ranks", or a hang without any message.

    Cause:
        A collective under a condition that holds on some ranks only: on the rank, on the data, in an except block; or
        in a separate thread, whose calls interleave with those of the training.

    Remedy:
        Make every rank call the same collectives in the same order.

    Cannot see:
        Calls that the recorder has overwritten, or whose stack it did not keep. In an inspected job, all earlier calls:
        only the current line of each rank is known. Which of several conditions or jumps led a rank around a call, or
        whether a value that a function returned did. Before Python 3.12, an exception that the user's code caught
        without logging it, unless it came out of a collective or a hook.
    """
    # Sends and receives that wait for each other keep everything after them waiting, too.
    if circle_of_p2p(view):
        return
    found = known_reason(view) or (None if _is_other_cause(view) else _by_calls(view))
    if found is not None:
        yield remedies.as_decided(view, _at_jump(view, with_decision(view, found)))


def _by_calls(view: Timeline) -> Finding | None:
    """What the recorder's entries show, else what the stacks show."""
    if view.divergence is not None:
        return mismatch(view, view.divergence)
    if has_misread_sizes(view):
        return misread_sizes(view)
    if (first := unnoticed_shift(view)) is not None:
        return unnoticed(view, first)
    if circle := _waiting_in_circle(view):
        return waits_elsewhere(view, tuple(out_of_step(view, view.waiting)) or circle)
    return after_abort(view) or waits_for_none(view) or inspected_waits(view)


def _waiting_in_circle(view: Timeline) -> tuple[int, ...]:
    """Ranks that others wait for and that wait elsewhere themselves: the ranks wait in a circle."""
    if view.working(view.facts) or any(facts.exception for facts in view.facts.values()):
        return ()
    if sole_receiver(view) is not None:
        return ()
    return tuple(rank for rank in view.behind if view.activities[rank].waits_for_peers)


def _is_other_cause(view: Timeline) -> bool:
    """Whether another rule explains it: uneven data, one rank that runs a sharded model alone, or an exception."""
    if out_of_data_first(view) or left_loop(view) or gathering_alone(view):
        return True
    return not all_garbled(view)


def _at_jump(view: Timeline, finding: Finding) -> Finding:
    """The same finding; if its ranks have jumped over its line under a condition that is not on the rank, at that jump.

    There they took another path than the others. That they did is observed; which jump it was is concluded.
    """
    deciding = decision(view, finding.location)
    if deciding is None or not deciding.is_jump_on_data or finding.ranks != deciding.around:
        return finding
    return as_concluded(finding, deciding)
