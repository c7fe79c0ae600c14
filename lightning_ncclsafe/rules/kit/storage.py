"""Where a rank writes to, in words."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import RankFacts, StorageFacts
from lightning_ncclsafe.facts.findings import Evidence


def directories(facts: RankFacts, *, of_checkpoints: bool) -> tuple[StorageFacts, ...]:
    """Directories of the checkpoint callbacks, or of everything else, which is the loggers."""
    return tuple(entry for entry in facts.storage if ("Checkpoint" in entry.owner) == of_checkpoints)


def directory_words(entry: StorageFacts) -> str:
    """``"/mnt/logs (nfs4)"``."""
    return f"{entry.path} ({entry.filesystem})" if entry.filesystem else entry.path


def storage_evidence(facts: RankFacts, *, of_checkpoints: bool) -> Iterator[Evidence]:
    """One line per directory: who writes there, and what file system it is on."""
    for entry in directories(facts, of_checkpoints=of_checkpoints):
        text = f"{entry.owner} writes to {directory_words(entry)}."
        yield Evidence(source="storage", rank=facts.rank, text=text)
