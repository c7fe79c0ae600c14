"""The cause slow-checkpoint: a rank is held up while it writes a checkpoint."""

from collections.abc import Iterator

from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.kit.activity import Kind
from lightning_ncclsafe.rules.kit.kinds import hang_rule
from lightning_ncclsafe.rules.kit.machine import directories, directory_words, storage_evidence
from lightning_ncclsafe.rules.kit.sentences import finding, how_we_know, standing, while_others_wait
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.wording import ranks_words, verb

_REMEDY = (
    "Write checkpoints to fast local storage and copy them away, save less often, write a sharded checkpoint so that "
    "all ranks share the work, or use AsyncCheckpointIO."
)


@hang_rule(after="slow-logger", remedy=_REMEDY)
def slow_checkpoint(view: Timeline) -> Iterator[Finding]:
    """A rank is writing a checkpoint while the others wait for it.

    Symptom:
        The others wait in a barrier or in the next step's collective; the last line printed is about a checkpoint.

    Cause:
        One rank writes the whole state, and the storage is slow, full or remote.

    Remedy:
        Faster storage, fewer or sharded checkpoints, or a save in the background.

    Cannot see:
        How much of the checkpoint has been written.
    """
    saving = tuple(rank for rank in view.suspects if view.activities[rank].kind is Kind.CHECKPOINT)
    if saving:
        yield _finding(view, saving)


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    places = ", ".join(directory_words(entry) for entry in directories(facts, of_checkpoints=True))
    to = f" to {places}" if places else ""
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'is', 'are')} writing a checkpoint{to}, {standing(view, ranks[0])}"
        f"{while_others_wait(view, ranks)}."
    )
    storage = (item for rank in ranks[:8] for item in storage_evidence(view.facts[rank], of_checkpoints=True))
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.CERTAIN if view.behind and view.waiting else Confidence.LIKELY,
        evidence=(*how_we_know(view, ranks), *storage),
    )
