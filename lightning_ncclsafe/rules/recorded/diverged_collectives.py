"""The cause diverged-collectives, as recorded: ranks called different collectives under the same number."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_ncclsafe.facts import StatementKind
from lightning_ncclsafe.rules.kit import Confidence, Finding, Plan, Timeline, recorded_rule
from lightning_ncclsafe.rules.recorded.splits import is_one_operation, split_finding, split_of, stated_finding

_WHY = "these can never complete together"
_UNLESS = "unless one of them still calls what the others wait in, these never complete"


@recorded_rule(
    after="mismatched-collective",
    remedy=(
        "Make every rank call the same collectives in the same order: no self.log(sync_dist=True), metric.compute(), "
        "all_gather, barrier or save_checkpoint under a condition on the rank or on the data, equally many batches on "
        "all ranks, and the same branches of the model in forward. No timeout is long enough for this."
    ),
    follows=("crossed-groups", "mismatched-collective"),
    reads_exceptions=True,
    plan=Plan.STOP,
    is_mutual=True,
)
def diverged_collectives(view: Timeline) -> Iterator[Finding]:
    """Under one sequence number of a group, ranks recorded different operations, sizes or types.

    Symptom:
        The ranks' timeouts have the same SeqNum but different OpType or NumelIn on some of them; "Detected mismatch
        between collectives on ranks" (TORCH_DISTRIBUTED_DEBUG=DETAIL).

    Cause:
        A collective under a condition that holds on some ranks only; a rank that is a batch ahead; different branches.

    Remedy:
        Make every rank call the same collectives in the same order.

    Cannot see:
        What came before the recorder's oldest entry: this is the first difference among the entries that were kept.
    """
    split = split_of(view)
    if split is not None and not is_one_operation(split):
        yield split_finding(view, split, _WHY)
    yield from stated_finding(view, StatementKind.OTHER_OPERATIONS, _WHY)
    for finding in stated_finding(view, StatementKind.APART, _UNLESS):
        yield replace(finding, confidence=Confidence.POSSIBLE)
