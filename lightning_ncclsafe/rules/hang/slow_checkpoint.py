"""The cause slow-checkpoint: a rank is held up while it writes a checkpoint."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.kit.activity import Kind
from lightning_ncclsafe.rules.kit.sentences import how_we_know, location, severity, standing, while_others_wait
from lightning_ncclsafe.rules.kit.storage import directories, directory_words, storage_evidence
from lightning_ncclsafe.rules.kit.timeline import Timeline, timeline
from lightning_ncclsafe.rules.kit.wording import capitalised, ranks_words, verb

_REMEDY = (
    "Write checkpoints to fast local storage and copy them away, save less often, write a sharded checkpoint so that "
    "all ranks share the work, or use AsyncCheckpointIO."
)


def slow_checkpoint(job: JobFacts) -> Iterable[Finding]:
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
    view = timeline(job)
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
    return Finding(
        rule="slow-checkpoint",
        severity=severity(view.job),
        confidence=Confidence.CERTAIN if view.behind and view.waiting else Confidence.LIKELY,
        summary=capitalised(text),
        ranks=ranks,
        location=location(view, ranks),
        evidence=(*how_we_know(view, ranks), *storage),
        remedy=_REMEDY,
    )
