"""The cause slow-checkpoint: the others wait for a rank that writes a checkpoint."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    LISTED,
    Finding,
    Kind,
    Plan,
    Timeline,
    directories,
    directory_words,
    hang_rule,
    how_we_know,
    storage_evidence,
    straggler_confidence,
    straggler_finding,
)


@hang_rule(
    after="slow-logger",
    remedy=(
        "Write checkpoints to fast local storage and copy them away, save less often, write a sharded checkpoint so "
        "that all ranks share the work, or use AsyncCheckpointIO."
    ),
    plan=Plan.RESTART,
)
def slow_checkpoint(view: Timeline) -> Iterator[Finding]:
    """A rank is writing a checkpoint while the others wait for it.

    Symptom:
        The others wait in a barrier or in the next step's collective; the last line printed is about a checkpoint.

    Cause:
        One rank writes the whole state, and the storage is slow, full or remote.

    Remedy:
        Use faster storage, fewer or sharded checkpoints, or save in the background.

    Cannot see:
        How much of the checkpoint has been written.
    """
    ranks = tuple(rank for rank in view.suspects if view.activities[rank].kind is Kind.CHECKPOINT)
    if not ranks:
        return
    places = ", ".join(map(directory_words, directories(view.facts[ranks[0]], of_checkpoints=True)))
    storage = (item for rank in ranks[:LISTED] for item in storage_evidence(view.facts[rank], of_checkpoints=True))
    yield straggler_finding(
        view,
        ranks,
        "is|are writing a checkpoint",
        f" to {places}" if places else "",
        confidence=straggler_confidence(view),
        evidence=(*how_we_know(view, ranks), *storage),
    )
