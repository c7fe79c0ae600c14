"""Who saves a run that is being ended, of all ranks that say where they stand: the same answer on every rank."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.rules.kit.wording import ranks_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one rank says of its weights.

    Attributes:
        rank: Global rank.
        step: The step that they are of; -1 where that cannot be told.
        validates: Whether a validation comes before the next batch.
        raised: Whether the rank itself has failed: another one is preferred.
        why: Why it cannot save; empty where it can.
        shard: Which part of the model it has: equal for equal parts, empty for all of it.
    """

    rank: int
    step: int = -1
    validates: bool = False
    raised: bool = False
    why: str = ""
    shard: str = ""


def savers(candidates: Iterable[Candidate], shards: Collection[str] = ("",)) -> list[Candidate]:
    """Who can save, in this order: of the newest step of which there is everything, healthy ones first.

    Args:
        candidates: What ranks say of their weights.
        shards: All parts that the model has.
    """
    able = [candidate for candidate in candidates if not candidate.why]
    for step in sorted({candidate.step for candidate in able}, reverse=True):
        there = [candidate for candidate in able if candidate.step == step]
        if {*shards} <= {candidate.shard for candidate in there}:
            return sorted(there, key=lambda each: (each.raised, each.rank))
    return []


def writers(order: Iterable[Candidate]) -> list[int]:
    """The ranks that save together: the first one of each part of the model."""
    first: dict[str, int] = {}
    for candidate in order:
        first.setdefault(candidate.shard, candidate.rank)
    return [*first.values()]


def why_none(candidates: Sequence[Candidate], shard_of: Sequence[str]) -> str:
    """Why no rank can save, in words.

    Args:
        candidates: What ranks say of their weights.
        shard_of: The part of the model that each rank of the job has; empty for all of it.
    """
    reasons: dict[str, list[int]] = {}
    for candidate in candidates:
        why = candidate.why or f"has a shard of the model, of step {candidate.step}"
        reasons.setdefault(why, []).append(candidate.rank)
    held = {candidate.shard for candidate in candidates if not candidate.why}
    for rank in sorted({*range(len(shard_of))} - {candidate.rank for candidate in candidates}):
        is_lost = shard_of[rank] and shard_of[rank] not in held
        why = "no answer, and no other rank has its shard of the model" if is_lost else "no answer"
        reasons.setdefault(why, []).append(rank)
    return "; ".join(f"{ranks_words(ranks)}: {why}" for why, ranks in reasons.items())
