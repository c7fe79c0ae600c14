"""Which ranks save a run that is being ended: the same answer on every rank."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.checkpoints.boundary import NO_STEP
from lightning_ncclsafe.exchange import Exchange, poll_interval_s, wait_for_keys
from lightning_ncclsafe.facts import codec
from lightning_ncclsafe.facts.wording import ranks_words

_ORDER = "checkpoint/order"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one rank reports about its weights.

    Attributes:
        rank: Global rank.
        step: The step that they belong to; -1 if unknown.
        validates: Whether a validation comes before the next batch.
        raised: Whether the rank itself has failed: another one is preferred.
        why: Why it cannot save; empty if it can.
        shard: Which shard of the model it has: equal for equal shards, empty for the whole model.
    """

    rank: int
    step: int = -1
    validates: bool = False
    raised: bool = False
    why: str = ""
    shard: str = ""


def publish_shard(exchange: Exchange, rank: int, shard: str) -> None:
    """Publishes which shard of the model this rank has, while all ranks run; at the end, some may not."""
    exchange.set(_shard_key(rank), shard.encode())


def agree_on_savers(
    exchange: Exchange, own: Candidate, world_size: int, *, is_split: bool, deadline_s: float
) -> tuple[Sequence[Candidate], str]:
    """Publishes what this rank can save, and waits for what the others can.

    Args:
        is_split: Whether each rank has only a shard of the model.

    Returns:
        The ranks that try to save, in this order, the same on all ranks; and why no rank can, in words, if no rank can
        although there is something to save.

    Raises:
        ExchangeError: If the exchange does not answer.
    """
    exchange.set(_candidate_key(own.rank), codec.encode(own))
    found = wait_for_keys(
        exchange,
        map(_candidate_key, range(world_size)),
        deadline_s=deadline_s,
        poll_s=poll_interval_s(world_size),
        give_up=lambda: _ORDER in exchange.get_many([_ORDER]),
    )
    candidates = sorted((codec.decode(Candidate, each) for each in found.values()), key=lambda each: each.rank)
    shard_of = [""] * world_size
    if is_split:
        published = exchange.get_many(map(_shard_key, range(world_size)))
        # A rank that never published its shard counts as having a unique one.
        shard_of = [published.get(key, key.encode()).decode() for key in map(_shard_key, range(world_size))]
    order = savers(candidates, {*shard_of})
    agreed = codec.decode(tuple[Candidate, ...], exchange.set_if_absent(_ORDER, codec.encode(order)))
    why = why_none(candidates, shard_of) if any(each.why != NO_STEP for each in candidates) and not agreed else ""
    return agreed, why


def _candidate_key(rank: int) -> str:
    return f"checkpoint/candidate/{rank}"


def _shard_key(rank: int) -> str:
    return f"checkpoint/shard/{rank}"


def savers(candidates: Iterable[Candidate], shards: Collection[str] = ("",)) -> list[Candidate]:
    """The ranks that can save, in this order: those with the newest complete step, healthy ones first."""
    able = [candidate for candidate in candidates if not candidate.why]
    for step in sorted({candidate.step for candidate in able}, reverse=True):
        there = [candidate for candidate in able if candidate.step == step]
        if {*shards} <= {candidate.shard for candidate in there}:
            return sorted(there, key=lambda each: (each.raised, each.rank))
    return []


def writers(order: Iterable[Candidate]) -> list[int]:
    """The ranks that save together: the first one for each shard of the model."""
    first: dict[str, int] = {}
    for candidate in order:
        first.setdefault(candidate.shard, candidate.rank)
    return [*first.values()]


def why_none(candidates: Sequence[Candidate], shard_of: Sequence[str]) -> str:
    """Why no rank can save, in words.

    Args:
        shard_of: The shard of the model that each rank of the job has; empty for the whole model.
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
