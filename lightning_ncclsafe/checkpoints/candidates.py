"""Who saves a run that is being ended, of all ranks that say where they stand: the same answer on every rank."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from lightning_ncclsafe.checkpoints.boundary import NO_STEP
from lightning_ncclsafe.exchange import Exchange, poll_interval_s, wait_for_keys
from lightning_ncclsafe.rules.kit.wording import ranks_words

_ORDER = "checkpoint/order"


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


def publish_shard(exchange: Exchange, rank: int, shard: str) -> None:
    """Publishes which part of the model this rank has, while all ranks are there; in the end some may not be.

    Raises:
        ExchangeError: If the exchange does not answer.
    """
    exchange.set(_shard_key(rank), shard.encode())


def published_shards(exchange: Exchange, world_size: int) -> list[str]:
    """Which part of the model each rank has; one that never published it has a part that nobody else has.

    Raises:
        ExchangeError: If the exchange does not answer.
    """
    keys = [_shard_key(rank) for rank in range(world_size)]
    found = exchange.get_many(keys)
    return [found[key].decode() if key in found else key for key in keys]


def agree_on_savers(
    exchange: Exchange, own: Candidate, world_size: int, *, is_split: bool, deadline_s: float
) -> tuple[list[Candidate], str]:
    """Publishes what this rank can save, and waits for what the others can.

    Args:
        exchange: What the ranks share.
        own: This rank.
        world_size: Number of ranks.
        is_split: Whether each rank has a part of the model only.
        deadline_s: Seconds that the others are waited for.

    Returns:
        Who tries, in this order, the same on all ranks; and why nobody can, in words, where nobody can and any rank
        has something to save.

    Raises:
        ExchangeError: If the exchange does not answer.
    """
    exchange.set(_candidate_key(own.rank), json.dumps(asdict(own)).encode())
    found = wait_for_keys(
        exchange,
        [_candidate_key(rank) for rank in range(world_size)],
        deadline_s=deadline_s,
        poll_s=poll_interval_s(world_size),
        give_up=lambda: _ORDER in exchange.get_many([_ORDER]),
    )
    candidates = sorted((Candidate(**json.loads(each)) for each in found.values()), key=lambda each: each.rank)
    shard_of = published_shards(exchange, world_size) if is_split else [""] * world_size
    order = [asdict(each) for each in savers(candidates, {*shard_of})]
    agreed = json.loads(exchange.set_if_absent(_ORDER, json.dumps(order).encode()))
    why = why_none(candidates, shard_of) if any(each.why != NO_STEP for each in candidates) and not agreed else ""
    return [Candidate(**each) for each in agreed], why


def _candidate_key(rank: int) -> str:
    return f"checkpoint/candidate/{rank}"


def _shard_key(rank: int) -> str:
    return f"checkpoint/shard/{rank}"


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
