"""The cause diverged-collectives, in dumps and logs: ranks called different operations under one number."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_ncclsafe.facts import StatementKind
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Plan,
    Timeline,
    capitalised,
    finding,
    ranks_words,
    recorded_rule,
)
from lightning_ncclsafe.rules.recorded.kit.divergences import (
    conflict,
    divergence_finding,
    is_one_operation,
    read_other_data,
    stated_finding,
)
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.statements import stated

_WHY_DIVERGED = "these can never complete together"
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
    split = conflict(view)
    if split is not None and not is_one_operation(split):
        yield divergence_finding(view, split, _WHY_DIVERGED)
    yield from stated_finding(view, StatementKind.OTHER_OPERATIONS, _WHY_DIVERGED)
    yield from _of_no_models(view)
    for unsure in stated_finding(view, StatementKind.APART, _UNLESS):
        yield replace(unsure, confidence=Confidence.POSSIBLE)


def _of_no_models(view: Timeline) -> Iterator[Finding]:
    """What ranks have read as numbers of parameters are other data."""
    ranks, found = read_other_data(view), stated(view, StatementKind.OTHER_MODEL)
    if not ranks or conflict(view) is not None or failed(view):
        return
    text = f"{ranks_words(ranks)} called something else where {ranks_words(found.by)} compared their models"
    why = f"{found[0].detail}, which is other data, as {ranks_words(ranks)} found no difference"
    yield finding(view, ranks, f"{capitalised(text)}: {why}.", evidence=found.evidence)
