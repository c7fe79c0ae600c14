"""The cause mismatched-collective, in dumps and logs: only sizes or types of one operation differ."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import StatementKind
from lightning_ncclsafe.rules.kit import Finding, Plan, Timeline, capitalised, finding, recorded_rule
from lightning_ncclsafe.rules.recorded.kit.divergences import (
    conflict,
    divergence_finding,
    is_one_operation,
    read_other_data,
    stated_finding,
)
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.statements import stated

_WHY_MISMATCHED = "the operation differs in size or type between ranks and cannot complete"


@recorded_rule(
    after="dead-rank",
    remedy=(
        "Either tensors differ: give this collective one shape and type on all ranks (pad them, or exchange their "
        "sizes first), and look for a last batch that is shorter on one rank. Or ranks are in different calls of one "
        "operation: one of them skipped a collective or called an extra one, under a condition on the rank or on the "
        "data. The lines that called them decide: record with TORCH_FR_BUFFER_SIZE=2000 if they are not given. No "
        "timeout is long enough."
    ),
    plan=Plan.STOP,
    is_mutual=True,
)
def mismatched_collective(view: Timeline) -> Iterator[Finding]:
    """Under one sequence number of a group, the number of elements or the type of one operation differs between ranks.

    Symptom:
        The ranks' timeouts have the same SeqNum and OpType but different NumelIn on some of them; "Detected mismatch
        between collectives on ranks" (TORCH_DISTRIBUTED_DEBUG=DETAIL).

    Cause:
        A tensor whose shape depends on the rank's data; a rank that is one collective ahead of the others or behind.

    Remedy:
        Make the tensors, or the order of calls, identical on all ranks.

    Cannot see:
        Which of the two it is, if the recorder kept no stacks; sizes that may differ (all_to_all, coalesced).
    """
    split = conflict(view)
    if split is not None and is_one_operation(split):
        yield divergence_finding(view, split, _WHY_MISMATCHED)
    yield from stated_finding(view, StatementKind.OTHER_SIZES, _WHY_MISMATCHED)
    yield from _of_models(view)


def _of_models(view: Timeline) -> Iterator[Finding]:
    """DDP has compared the numbers of parameters, as they were read."""
    found = stated(view, StatementKind.OTHER_MODEL)
    if not found or read_other_data(view) or conflict(view) is not None or failed(view):
        return
    ranks = found[0].ranks
    who = next(iter(rank for rank in ranks if rank != found[0].by), ranks[0])
    is_mutual = len(set(found.by) & set(ranks)) > 1
    why = "the models differ"
    if not is_mutual:
        why = f"the models differ, or rank {who} called something else there, as nothing checks what was read"
    yield finding(view, ranks, f"{capitalised(found[0].detail)}: {why}.", evidence=found.evidence)
