"""The cause unpresented-loader: some ranks have created their dataloaders, others are elsewhere."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import Frame, Phase
from lightning_ncclsafe.rules.kit import (
    AGREEMENT,
    Confidence,
    Finding,
    Severity,
    Timeline,
    alone_in_trainer,
    at_words,
    clause,
    condition_evidence,
    condition_of,
    finding,
    hang_rule,
    how_we_know,
    in_sanity_check,
    location_of,
    presented_stage,
    ranks_words,
    short_location,
    stack_evidence,
    under_words,
    unnoticed_shift,
    user_location,
    verb,
    wait_words,
    where_words,
)


@hang_rule(
    after="frozen-rank",
    remedy=(
        "Let every rank go through the same stages: look for validation that only some ranks run, a loader hook or an "
        "estimate of steps (trainer.estimated_stepping_batches) under a condition on the rank, or a fit that some "
        "ranks skip."
    ),
    unless=(alone_in_trainer, unnoticed_shift),
)
def unpresented_loader(view: Timeline) -> Iterator[Finding]:
    """Some ranks wait for the others to present their dataloaders, but those do something else.

    Symptom:
        Nothing happens before the first batch of a stage; without the comparison of loaders, a barrier or a collective
        of setup is paired with a different one, and everything after it is out of step.

    Cause:
        A stage that only some ranks go through, usually under a condition on the rank; or something else that asks for
        a dataloader there, such as trainer.estimated_stepping_batches.

    Remedy:
        Let every rank go through the same stages.

    Cannot see:
        Why the others are where they are; only where that is.
    """
    presenting = {rank: stage for rank, facts in view.facts.items() if (stage := presented_stage(facts))}
    elsewhere = tuple(sorted(view.facts.keys() - presenting.keys() - set(view.raised) - _has_left(view, presenting)))
    if presenting and elsewhere and not _left_validation(view, presenting, elsewhere):
        alone = tuple(rank for rank in sorted(presenting) if condition_of(view, rank))
        yield (
            _alone(view, presenting, elsewhere)
            if alone == (*sorted(presenting),)
            else _finding(view, presenting, elsewhere)
        )


def _has_left(view: Timeline, presenting: dict[int, str]) -> set[int]:
    """Ranks that were in this comparison and have given it up: the others do not wait for them."""
    left = {f"{AGREEMENT}{stage}" for stage in presenting.values()}
    return {rank for rank, facts in view.facts.items() if facts.progress.last_action in left}


def _left_validation(view: Timeline, presenting: dict[int, str], elsewhere: tuple[int, ...]) -> bool:
    """Whether all have been in the validation in which the others wait for a collective that is not made by all."""
    validated = {rank: view.facts[rank].steps.validated for rank in view.facts}
    if not all(map(view.waits, elsewhere)) or not all(validated[rank] for rank in presenting):
        return False
    # Where they had fewer batches of a validation, they may have left out a whole one, too.
    is_same = min(validated[rank] for rank in presenting) >= max(validated[rank] for rank in elsewhere)
    validating = is_same and all(view.facts[rank].progress.phase is Phase.VALIDATE for rank in elsewhere)
    return validating or {*elsewhere} <= {*in_sanity_check(view)}


def _asked_at(view: Timeline, presenting: dict[int, str]) -> Frame | None:
    """The user's line that asked for the loaders; None if Lightning did."""
    places = (view.activities[rank].place for rank in sorted(presenting))
    return next((place for place in places if place is not None and place.user), None)


def _alone(view: Timeline, presenting: dict[int, str], elsewhere: tuple[int, ...]) -> Finding:
    """The presenting ranks are under a condition on the rank, so the others will never come."""
    ranks, asked = tuple(sorted(presenting)), _asked_at(view, presenting)
    text = (
        f"{clause(ranks, 'has|have asked for the')} {presenting[ranks[0]]} alone{at_words(asked)}, "
        f"{under_words(condition_of(view, ranks[0]))}, which all ranks must do; {ranks_words(elsewhere)} "
        f"{verb(elsewhere, 'is', 'are')} {where_words(view, elsewhere[0])}."
    )
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR if all(map(view.waits, elsewhere)) else None,
        location=location_of(asked),
        evidence=(*condition_evidence(view, ranks), *how_we_know(view, elsewhere)),
    )


def _finding(view: Timeline, presenting: dict[int, str], elsewhere: tuple[int, ...]) -> Finding:
    stuck = all(view.waits(rank) for rank in elsewhere)
    # If most ranks are elsewhere, those that present may have come here alone, under a condition on their data.
    are_few = 2 * len(elsewhere) < len(view.facts)
    rank = elsewhere[0]
    asked = _asked_at(view, presenting)
    waits = f", and {verb(elsewhere, 'waits', 'wait')} in {wait_words(view, rank)}" if view.waits(rank) else ""
    text = (
        f"{clause(elsewhere, 'has|have not presented a')} {next(iter(presenting.values()))}, "
        f"for which {ranks_words(presenting)} {verb(tuple(presenting), 'waits', 'wait')}"
        f"{f', asked for at {short_location(asked)}' if asked else ''}; "
        f"{verb(elsewhere, 'it is', 'they are')} {where_words(view, rank)}{waits}."
    )
    return finding(
        view,
        elsewhere,
        text,
        severity=Severity.ERROR if stuck else None,
        confidence=Confidence.CERTAIN if stuck and are_few else Confidence.LIKELY,
        location=location_of(asked) or user_location(view, elsewhere),
        evidence=(*how_we_know(view, elsewhere), *stack_evidence(view, sorted(presenting)[:1])),
    )
