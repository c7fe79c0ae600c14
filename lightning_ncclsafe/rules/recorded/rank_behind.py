"""The cause rank-behind, as recorded: ranks wait, and no better-known cause fits."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.hang.rank_behind import is_named_otherwise
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    GroupView,
    Timeline,
    at_words,
    clause,
    deepest_user_frame,
    finding,
    group_words,
    location_of,
    recorded_rule,
)
from lightning_ncclsafe.rules.recorded.kit.calls import has_moved
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    counters_evidence,
    exception_in_log,
    log_evidence,
    waiting_in,
    waiting_words,
)


@recorded_rule(
    after="all-joined",
    remedy=(
        "Read the dumps and logs of all ranks, if there are more. Dumps say the most: set TORCH_FR_BUFFER_SIZE=2000 "
        "and TORCH_NCCL_DUMP_ON_TIMEOUT=1 before the run. A strategy of this package says more, with each rank's line "
        "of code."
    ),
    superseded=is_named_otherwise,
)
def rank_behind(view: Timeline) -> Iterator[Finding]:
    """Ranks wait in a group, and what was read does not show for whom.

    Symptom:
        Timeouts of some ranks, with different sequence numbers or in different groups.

    Cause:
        None of the known causes, or too little was read: look at the ranks that are furthest behind.

    Remedy:
        Read the dumps and logs of all ranks.

    Cannot see:
        What a rank did, if nothing of it was read.
    """
    if has_moved(view.job):
        return
    waiting = [group for group in view.groups if group.seq is not None]
    if waiting:
        yield _finding(view, min(waiting, key=lambda group: (-len(group.oldest), group.name)))
    elif view.waiting:
        yield _without_collectives(view)
    else:
        yield from _unnamed(view)


def _without_collectives(view: Timeline) -> Finding:
    who = view.waiting
    text = clause(who, "reports|report that a peer was gone or late, but not which")
    raised = ((rank, view.facts[rank].exception) for rank in who[:4])
    exceptions = (exception_in_log(one, rank) for rank, one in raised if one is not None)
    return finding(
        view,
        (),
        f"{text}.",
        confidence=Confidence.POSSIBLE,
        evidence=(*exceptions, *log_evidence(view, who[:2])),
    )


def _unnamed(view: Timeline) -> Iterator[Finding]:
    lost = [exception for exception in view.job.unnamed if exception.is_consequence]
    for exception in lost[:1]:
        frame = deepest_user_frame(exception.stack)
        at = at_words(frame)
        yield finding(
            view,
            (),
            f"A rank that the log does not name waited in vain{at}: a peer was gone or late, but not named.",
            confidence=Confidence.POSSIBLE,
            location=location_of(frame),
            evidence=(exception_in_log(exception),),
        )


def _finding(view: Timeline, group: GroupView) -> Finding:
    least = min(group.oldest.values())
    first = tuple(sorted(rank for rank, seq in group.oldest.items() if seq == least))
    ranks = group.behind or (first if len(first) < len(group.oldest) else ())
    waiting = waiting_in(view, group)
    text = f"In {group_words(group.name)} {waiting_words(waiting)}, and what was read does not show for whom"
    if ranks:
        text += f"; {clause(ranks, 'is|are furthest behind')}"
    return finding(
        view,
        ranks,
        f"{text}.",
        confidence=Confidence.POSSIBLE,
        evidence=(
            *counters_evidence(view, group),
            *log_evidence(view, [*waiting][:2]),
        ),
    )
