"""The cause late-at-init, in a log: PyTorch itself names the rank that others have waited for."""

from collections import Counter
from collections.abc import Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.findings import Confidence, Finding, Severity
from lightning_ncclsafe.rules.recorded.ended import gone
from lightning_ncclsafe.rules.recorded.telling import LOOK_THERE, quotes
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, ranks_words, verb

SET_UP = "the set-up of the NCCL communicator"
_REMEDY = (
    "This is no fault of the network: look at what this rank does before its first collective. Do downloads, "
    "tokenising, indexing and reading of large files once, ahead of the job or in prepare_data; see whether its host "
    "swaps. " + LOOK_THERE
)


def late_at_init(job: JobFacts) -> Iterable[Finding]:
    """Ranks waited for another one while their first communicator was set up, and say for which.

    Symptom:
        "[5] is setting up NCCL communicator and retrieving ncclUniqueId from [0] … Socket Timeout".

    Cause:
        The rank named there prepares data, downloads, compiles or swaps, or has failed before its first collective.

    Remedy:
        Prepare ahead of the job or in prepare_data; where the host swaps, need less memory in each rank.

    Cannot see:
        What that rank did; that is in its own output, or in a report of this package's guard.
    """
    view = timeline(job)
    awaited = _awaited(view)
    if awaited and not gone(view):
        yield _finding(view, awaited)


def _awaited(view: Timeline) -> dict[int, int]:
    """How many ranks waited for each."""
    counts: Counter[int] = Counter()
    for facts in view.facts.values():
        if facts.record is not None and facts.record.awaited_in == SET_UP:
            counts.update(facts.record.awaited)
    return dict(counts)


def _finding(view: Timeline, awaited: dict[int, int]) -> Finding:
    ranks = tuple(sorted(awaited))
    waited = tuple(
        rank for rank, facts in view.facts.items() if facts.record is not None and facts.record.awaited_in == SET_UP
    )
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} not come to the first collective, for whose set-up "
        f"{ranks_words(waited)} waited"
    )
    return Finding(
        rule="late-at-init",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        summary=f"{capitalised(text)}.",
        ranks=ranks,
        evidence=tuple(line for rank in waited[:3] for line in quotes(view.facts[rank])),
        remedy=_REMEDY,
    )
