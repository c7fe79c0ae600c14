"""The cause slow-logger: a rank is held up in a logger's write or flush."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.findings import Confidence, Finding
from lightning_ncclsafe.rules.activity import Kind
from lightning_ncclsafe.rules.sentences import how_we_know, location, severity, standing, while_others_wait
from lightning_ncclsafe.rules.storage import directories, directory_words, storage_evidence
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, ranks_words, verb

_REMEDY = (
    "Log to a directory on a local disk and copy it away after the run, log less often (log_every_n_steps, "
    "self.log(on_step=False)), or take the logger off the training thread."
)


def slow_logger(job: JobFacts) -> Iterable[Finding]:
    """A rank, mostly rank 0, is held up in a logger while the others wait in a collective.

    Symptom:
        Steps become slow on all ranks but one, then a collective times out; the one rank never reports.

    Cause:
        The logger writes, flushes or sends on the training thread, and its storage or server is slow.

    Remedy:
        Log to a local disk, less often, or off the training thread.

    Cannot see:
        How fast the storage would be, and what a logger's own background thread or server does.
    """
    view = timeline(job)
    held = tuple(rank for rank in view.suspects if view.activities[rank].kind is Kind.LOGGER)
    if held:
        yield _finding(view, held)


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    places = ", ".join(directory_words(entry) for entry in directories(facts, of_checkpoints=False))
    to = f", writing to {places}" if places else ""
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'is', 'are')} held up in a logger{to}, {standing(view, ranks[0])}"
        f"{while_others_wait(view, ranks)}."
    )
    storage = (item for rank in ranks[:8] for item in storage_evidence(view.facts[rank], of_checkpoints=False))
    return Finding(
        rule="slow-logger",
        severity=severity(view.job),
        confidence=Confidence.CERTAIN if view.behind and view.waiting else Confidence.LIKELY,
        summary=capitalised(text),
        ranks=ranks,
        location=location(view, ranks),
        evidence=(*how_we_know(view, ranks), *storage),
        remedy=_REMEDY,
    )
