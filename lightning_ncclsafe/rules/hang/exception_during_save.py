"""The cause exception-during-save: a rank raised while it saved a checkpoint, and its peers wait in that save."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import Phase, RankFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Severity,
    Timeline,
    advice,
    at_words,
    batch_words,
    directories,
    directory_words,
    error_words,
    exception_evidence,
    exception_place,
    finding,
    hang_rule,
    has_misread_sizes,
    is_save,
    joined,
    location_of,
    ranks_by,
    ranks_words,
    short_place,
    storage_evidence,
    type_and_place,
    verb,
    while_others_wait,
)

_LISTED = 4
_KEEP_STATE = (
    "Keep what can be pickled of it (its state as numbers, tensors and dicts), or leave it out of the checkpoint"
)
_REMEDY = (
    "{advice}. The other ranks wait for the rest of the save; what they print about lost connections is a consequence."
)


@hang_rule(after="worker-died", reads_exceptions=True)
def exception_during_save(view: Timeline) -> Iterator[Finding]:
    """A rank raised an exception while saving a checkpoint, and the others wait in that save.

    Symptom:
        One rank prints a traceback of a save; the others wait in its barrier or gather until the timeout.

    Cause:
        No space left, no permission, a path that exists on one host only, state that cannot be pickled.

    Remedy:
        Fix what the exception reports.

    Cannot see:
        Whether the checkpoint file is complete; use the previous one.
    """
    raised = {rank: view.facts[rank] for rank in view.raised if not has_misread_sizes(view)}
    saving = {rank: type_and_place(facts) for rank, facts in raised.items() if _raised_in_save(facts)}
    for ranks in ranks_by(saving).values():
        yield _finding(view, ranks)


def _raised_in_save(facts: RankFacts) -> bool:
    """Whether a rank raised in a save of a checkpoint; in a prediction, what looks like one saves predictions."""
    is_training = facts.progress.phase is not Phase.PREDICT
    return facts.exception is not None and is_training and is_save(facts.exception.stack)


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    error, frame = facts.exception, exception_place(facts)
    assert error is not None
    places = ", ".join(directory_words(entry) for entry in directories(facts, of_checkpoints=True))
    to = f" to {places}" if places else ""
    text = (
        f"{ranks_words(ranks)} raised {error_words(error)} while {verb(ranks, 'it', 'they')} saved a checkpoint"
        f"{to}{at_words(frame)}, {batch_words(facts.progress)}{while_others_wait(view, ranks)}."
    )
    kept_at = facts.steps.unsaved_at
    at = f", kept at {' or '.join(map(short_place, kept_at[:_LISTED]))}" if kept_at else ""
    unsaved = f"What cannot be pickled is {facts.steps.unsaved}{at}." if facts.steps.unsaved else ""
    return finding(
        view,
        ranks,
        joined((text, unsaved)),
        severity=Severity.ERROR,
        confidence=Confidence.CERTAIN,
        location=location_of(frame) or (kept_at[0] if len(kept_at) == 1 else ""),
        evidence=(
            *exception_evidence(facts),
            *storage_evidence(facts, of_checkpoints=True),
        ),
        remedy=_REMEDY.format(advice=_KEEP_STATE if unsaved else advice(error)),
    )
