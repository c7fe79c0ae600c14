"""Ranks that wait in different calls of the Trainer, or before one that the others have made."""

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.rules.hang.diverged_collectives import remedies
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Timeline,
    at_words,
    capitalised,
    clause,
    condition_evidence,
    condition_of,
    deepest_user_frame,
    finding,
    location_of,
    others_wait,
    place_words,
    ranks_words,
    silent_words,
    trainer_start,
    under_words,
    verb,
    where_evidence,
    where_words,
    while_others_wait,
)


def called_alone(view: Timeline, ranks: tuple[int, ...], condition: str) -> Finding:
    """Some ranks have called the Trainer; the others are in another call of it, or in none, and have no guard."""
    stack = view.facts[ranks[0]].stack
    caller = deepest_user_frame(stack[: trainer_start(stack) or None])
    others = tuple(rank for rank in sorted(view.facts) if rank not in ranks)
    elsewhere = f" {capitalised(ranks_words(others))} {verb(others, 'is', 'are')} in another call." if others else ""
    text = (
        f"{clause(ranks, 'has|have called the Trainer alone')}"
        f"{at_words(caller)}, {under_words(condition)}: "
        f"{others_wait(view) or where_words(view, ranks[0])}.{elsewhere}{silent_words(view)}"
    )
    evidence = where_evidence(view, view.facts)
    return finding(view, ranks, text, location=location_of(caller), evidence=evidence, remedy=remedies.TRAINER)


def called_before(view: Timeline, stacks: dict[int, tuple[Frame, ...]]) -> Finding:
    """Between two calls of the Trainer, some ranks call a collective, and the others are already in the next call."""
    ranks = tuple(sorted(stacks))
    frame = deepest_user_frame(stacks[ranks[0]])
    conditions = [condition for rank in ranks if (condition := condition_of(view, rank))]
    under = f", {under_words(conditions[0])}" if conditions else ""
    text = (
        f"{clause(ranks, 'waits|wait for all ranks')} {place_words(frame)}{under}, outside of the Trainer, which "
        f"the others have called{while_others_wait(view, ranks)}."
    )
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.CERTAIN if len(conditions) == len(ranks) else Confidence.LIKELY,
        location=location_of(frame),
        evidence=(*condition_evidence(view, ranks), *where_evidence(view, view.facts)),
    )
