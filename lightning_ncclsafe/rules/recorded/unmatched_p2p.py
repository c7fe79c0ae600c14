"""The cause unmatched-p2p: a send or receive whose other side was never called, mostly between pipeline stages."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import Collective
from lightning_ncclsafe.rules.hang.unmatched_p2p import in_circle
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Plan,
    Timeline,
    circle_of_p2p,
    clause,
    finding,
    numel,
    outstanding_p2p,
    recorded_rule,
)
from lightning_ncclsafe.rules.recorded.kit.calls import end_of, has_dumps
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    NO_LONGER_TIMEOUT,
    consequence_evidence,
    described,
    first_site,
)
from lightning_ncclsafe.rules.recorded.kit.roots import Root, RootCause, roots_of

_LISTED = 6


@recorded_rule(
    after="host-stuck",
    remedy=(
        "Look at what the rank that is waited for does instead: another number of microbatches, a stage that works "
        "alone or has failed, sends and receives in another order than on its neighbour. Where ranks wait for one "
        "another in a circle, pair each send with its receive in dist.batch_isend_irecv. "
    )
    + NO_LONGER_TIMEOUT,
    plan=Plan.STOP,
)
def unmatched_p2p(view: Timeline) -> Iterator[Finding]:
    """Ranks wait in sends and receives whose other side is not called, because it waits for them in turn.

    Symptom:
        "nccl:recv 1<-0" that has not completed on rank 1, without a send on rank 0, which waits as well.

    Cause:
        Pipeline stages that disagree about the number or the order of what they exchange; a stage that is elsewhere.

    Remedy:
        Pair each send with a receive; see in which order neighbours call them.

    Cannot see:
        Which side called one too many; which pair it is, if several pairs of a circle wait for each other. A rank
        that has nothing outstanding and that neighbours wait for is reported as host-stuck.
    """
    if not has_dumps(view.job):
        if circle := circle_of_p2p(view):
            yield in_circle(view, circle)
    elif not failed(view):
        yield from (_finding(view, root) for root in roots_of(view, RootCause.UNMATCHED))


def _finding(view: Timeline, root: Root) -> Finding:
    first = {rank: outstanding_p2p(view.facts[rank]) for rank in root.circle}
    calls = {rank: call for rank, call in first.items() if call is not None}
    passed = tuple(rank for rank, call in first.items() if call is None)
    parts = [_hop(view, rank, call) for rank, call in calls.items()]
    more = f" and {len(parts) - _LISTED:,} more" if len(parts) > _LISTED else ""
    why = "they wait for each other in a circle"
    if len(calls) == 2 and len({numel(call) for call in calls.values()}) == 2 and _is_a_pair(view, calls):
        sizes = " and ".join(f"{numel(call):,} elements" for call in calls.values())
        why = f"what is sent and what is received differ in size ({sizes})"
    if root.is_astray and (end := end_of(view, calls[root.ranks[0]])) is not None:
        why += f", and the dump of rank {root.ranks[0]} shows no earlier exchange with rank {end[1]}"
    if passed:
        why = clause(passed, "has|have continued without the other side")
    return finding(
        view,
        root.ranks,
        f"{'; '.join(parts[:_LISTED])}{more}: {why}.",
        confidence=Confidence.LIKELY if root.is_sure else Confidence.POSSIBLE,
        location=first_site(calls.values()),
        evidence=(
            *(
                Evidence(source="flight recorder", rank=rank, text=f"Has not completed {described(call)}.")
                for rank, call in list(calls.items())[:_LISTED]
            ),
            *consequence_evidence([root]),
        ),
    )


def _is_a_pair(view: Timeline, calls: dict[int, Collective]) -> bool:
    """Whether one is the other side of the other."""
    ends = {rank: end_of(view, call) for rank, call in calls.items()}
    kinds = {end[0] for end in ends.values() if end is not None and end[1] in calls}
    return kinds == {"send", "recv"}


def _hop(view: Timeline, rank: int, call: Collective) -> str:
    end = end_of(view, call)
    return f"rank {rank} waits in {call.op}" + (f" for rank {end[1]}" if end is not None else "")
