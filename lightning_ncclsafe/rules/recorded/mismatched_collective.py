"""The cause mismatched-collective, as recorded: one operation with other sizes or types on some ranks."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import StatementKind
from lightning_ncclsafe.rules.kit import Finding, Plan, Timeline, recorded_rule
from lightning_ncclsafe.rules.recorded.splits import is_one_operation, split_finding, split_of, stated_finding

_WHY = "the operation differs in size or type between ranks and cannot complete"


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
    split = split_of(view)
    if split is not None and is_one_operation(split):
        yield split_finding(view, split, _WHY)
    yield from stated_finding(view, StatementKind.OTHER_SIZES, _WHY)
