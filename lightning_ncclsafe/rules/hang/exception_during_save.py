"""The cause exception-during-save: a rank raised while it saved a checkpoint, and its peers wait in that save."""

from collections import defaultdict
from collections.abc import Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.rules.kit.saves import advice, is_save, said
from lightning_ncclsafe.rules.kit.sentences import batch_words, exception_place, while_others_wait
from lightning_ncclsafe.rules.kit.storage import directories, directory_words, storage_evidence
from lightning_ncclsafe.rules.kit.timeline import Timeline, timeline
from lightning_ncclsafe.rules.kit.wording import capitalised, location_of, ranks_words, short_location, verb

_REMEDY = (
    "{advice}. The other ranks wait for the rest of the save; what they print about lost connections is a consequence."
)


def exception_during_save(job: JobFacts) -> Iterable[Finding]:
    """An exception of its own has ended a rank in the midst of a checkpoint's save.

    Symptom:
        One rank prints a traceback of a save, the others wait in its barrier or gather until the timeout.

    Cause:
        No space left, no permission, a path that exists on one host only, state that cannot be pickled.

    Remedy:
        What the exception says.

    Cannot see:
        Whether the checkpoint's file is complete: rather take the one before.
    """
    view = timeline(job)
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in view.raised:
        error = view.facts[rank].exception
        if error is not None and is_save(error.stack):
            alike[error.type, location_of(exception_place(view.facts[rank]))].append(rank)
    for ranks in alike.values():
        yield _finding(view, tuple(ranks))


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    error, frame = facts.exception, exception_place(facts)
    assert error is not None
    at = f" at {short_location(frame)}" if frame else ""
    places = ", ".join(directory_words(entry) for entry in directories(facts, of_checkpoints=True))
    to = f" to {places}" if places else ""
    text = (
        f"{ranks_words(ranks)} raised {said(error)} while {verb(ranks, 'it', 'they')} saved a checkpoint{to}{at}, "
        f"{batch_words(facts.progress)}{while_others_wait(view, ranks)}."
    )
    return Finding(
        rule="exception-during-save",
        severity=Severity.ERROR,
        confidence=Confidence.CERTAIN,
        summary=capitalised(text),
        ranks=ranks,
        location=location_of(frame),
        evidence=(
            Evidence(source="exception", rank=facts.rank, text=f"{error.type}: {error.message}"),
            *storage_evidence(facts, of_checkpoints=True),
        ),
        remedy=_REMEDY.format(advice=advice(error)),
    )
