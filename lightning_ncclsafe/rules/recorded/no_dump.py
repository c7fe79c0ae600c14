"""The cause no-dump: all ranks with a dump wait, and some have none."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Findings,
    Timeline,
    clause,
    finding,
    ranks_words,
    recorded_rule,
    verb,
)
from lightning_ncclsafe.rules.recorded.kit.calls import has_dumps
from lightning_ncclsafe.rules.recorded.kit.divergences import conflict
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    consequence_evidence,
    counters_evidence,
    finished_evidence,
    one_element_evidence,
    waiting_in,
    waiting_on_peers,
    waiting_words,
)
from lightning_ncclsafe.rules.recorded.kit.roots import Root, RootCause, roots, roots_of


def is_dead(finding: Finding, others: Findings) -> bool:
    """Whether it is known which of these ranks has ended, so that there is no dump to look for."""
    return any(other.ranks and set(other.ranks) <= set(finding.ranks) for other in others.likely(("dead-rank",)))


@recorded_rule(
    after="gpu-stuck",
    superseded=is_dead,
    remedy=(
        "Look at this rank's own output and at its host first: a rank that crashes or is killed writes no dump, nor "
        "does one whose watchdog cannot run. If its file was merely not copied, or is on another host's disk, add "
        "it and run this again. TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE have to be set on all ranks."
    ),
)
def no_dump(view: Timeline) -> Iterator[Finding]:
    """Every rank whose dump was read waits; what they wait for can only be a rank without one.

    Symptom:
        A folder of dumps in which ranks are missing, while all that are there wait in the same collective.

    Cause:
        The rank crashed, was killed, or hangs so that its watchdog cannot run; or its file is elsewhere.

    Remedy:
        Look at its own output and host; add its dump if there is one.

    Cannot see:
        Anything about that rank. A dump that is older than the others, or of another run, counts as none.
    """
    if not has_dumps(view.job):
        return
    found = roots_of(view, RootCause.UNREAD)
    if found and not failed(view):
        yield _finding(view, max(found, key=lambda root: len(root.held)), found)


def _finding(view: Timeline, first: Root, found: list[Root]) -> Finding:
    ranks = tuple(sorted(rank for root in found for rank in root.ranks))
    group = view.groups_by_name.get(first.ops[0][0]) if first.ops else None
    waiting = waiting_in(view, group) if group is not None else waiting_on_peers(view, ranks)
    only = (
        len(view.silent) == 1
        and all(root.cause is RootCause.UNREAD for root in roots(view))
        and conflict(view) is None
        and view.facts.keys() == set(first.held)
    )
    whom = f"{'one of ' * (len(ranks) > 1)}{ranks_words(ranks)}"
    older = tuple(rank for rank in ranks if rank in view.job.outdated)
    others = tuple(rank for rank in ranks if rank in view.job.left_out)
    if others:
        whose = f"the {verb(others, 'dump', 'dumps')} of {clause(others, 'is|are')}"
        who = f"{whose} not of this run and rank, and the others wait"
        then = f"They may wait for {whom}"
    elif older:
        whose = f"The dumps of {ranks_words(older)}"
        who = f"{whose} are older than those of the others, or of another start, and the others wait"
        then = f"Unless the run still moved then, these wait for {whom}"
    else:
        empty = tuple(rank for rank in ranks if rank in view.facts)
        who = f"no dump of {ranks_words(ranks)} was read, and the others wait"
        if empty:
            who = f"the {verb(ranks, 'dump', 'dumps')} of {clause(ranks, 'says|say nothing')}"
        then = f"{'It is' if len(ranks) == 1 else 'One of them is'} probably what they wait for"
    text = f"{who}: {waiting_words(waiting)}. {then}"
    return finding(
        view,
        ranks,
        f"{text}.",
        confidence=Confidence.LIKELY if only and not (older or others) else Confidence.POSSIBLE,
        evidence=(
            *finished_evidence(view, ranks),
            *(counters_evidence(view, group) if group is not None else ()),
            *one_element_evidence(waiting.values()),
            *consequence_evidence(found),
        ),
    )
