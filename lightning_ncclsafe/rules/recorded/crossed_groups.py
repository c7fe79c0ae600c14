"""The cause crossed-groups, as recorded: ranks called collectives of several groups in another order."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.hang.crossed_groups import crossed_groups as crossed_on_stacks
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Plan,
    Timeline,
    clause,
    finding,
    group_words,
    recorded_rule,
)
from lightning_ncclsafe.rules.recorded.kit.calls import has_dumps, open_calls
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    consequence_evidence,
    counters_evidence,
    described,
    first_site,
)
from lightning_ncclsafe.rules.recorded.kit.roots import Root, RootCause, roots_of

_LISTED = 4


@recorded_rule(
    after="unmatched-p2p",
    remedy=(
        "Call the collectives of several groups in one order on all ranks: the same list of groups, sorted alike, and "
        "no group entered under a condition on the rank before another one. With NCCL, this applies to asynchronous "
        "collectives, too: each waits on the device for those before it. No timeout is long enough for this."
    ),
    plan=Plan.STOP,
)
def crossed_groups(view: Timeline) -> Iterator[Finding]:
    """Ranks wait in one group for others, which wait in another group for them.

    Symptom:
        Each process group reports its own timeout; the order of calls in the recorders (record_id) differs between
        ranks.

    Cause:
        Overlapping groups (data and tensor parallel, experts) that are entered in an order that depends on the rank.

    Remedy:
        Use one order of groups on all ranks.

    Cannot see:
        Which of two orders was intended, if as many ranks use the one as the other.
    """
    if not has_dumps(view.job):
        yield from crossed_on_stacks(view)
        return
    if not failed(view):
        yield from (_finding(view, root) for root in roots_of(view, RootCause.ORDER))


def _finding(view: Timeline, root: Root) -> Finding:
    first = {rank: open_calls(view.facts[rank])[0] for rank in root.circle}
    parts = [f"rank {rank} waits in {described(call)} of {group_words(call.group)}" for rank, call in first.items()]
    more = f" and {len(parts) - _LISTED:,} more" if len(parts) > _LISTED else ""
    odd = "" if root.ranks == root.circle else (f"; {clause(root.ranks, 'uses|use a different order from most')}")
    return finding(
        view,
        root.ranks,
        f"{', '.join(parts[:_LISTED])}{more}: they wait for each other in a circle{odd}.",
        confidence=Confidence.LIKELY if root.is_sure else Confidence.POSSIBLE,
        location=first_site(first[rank] for rank in root.ranks),
        evidence=(*_evidence(view, root), *consequence_evidence([root])),
    )


def _evidence(view: Timeline, root: Root) -> Iterator[Evidence]:
    for rank in root.circle[:_LISTED]:
        calls = open_calls(view.facts[rank])[:3]
        order = ", then ".join(f"{described(call)} of {group_words(call.group)}" for call in calls)
        yield Evidence(source="flight recorder", rank=rank, text=f"Called {order}.")
    for name in dict.fromkeys(name for name, _ in root.ops[:_LISTED]):
        yield from counters_evidence(view, view.groups_by_name[name])
