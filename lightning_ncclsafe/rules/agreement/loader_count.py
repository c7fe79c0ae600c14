"""The cause loader-count: ranks have different loaders to go through."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import DataFacts, JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding, Severity
from lightning_ncclsafe.rules.kit.data import JobData, Questions, differences
from lightning_ncclsafe.rules.kit.differences import deviating, differing_evidence, spread

_QUESTIONS: Questions[DataFacts] = {
    "stage": lambda data: data.stage,
    "number of loaders": lambda data: len(data.loaders),
    "mode": lambda data: data.mode,
}
_REMEDY = (
    "Return the same loaders in the same order and mode from the hook on every rank, an empty one where a rank has no "
    "data, and call the Trainer's methods in the same order on all ranks; look for a condition on the rank around them."
)


def loader_count(job: JobFacts) -> Iterable[Finding]:
    """Ranks present different numbers of loaders, loaders of different stages, or combine them differently.

    Symptom:
        The run hangs when one rank begins its second validation loader, or as soon as two ranks are in two stages.

    Cause:
        A condition on the rank around a loader or a call of the Trainer, files that exist on some hosts only.

    Remedy:
        Return the same loaders in the same order and mode on every rank.

    Cannot see:
        Loaders that the user's own code makes and goes through by itself.
    """
    view = JobData(job)
    found = differences(view.data, _QUESTIONS)
    if found:
        what, groups = next(iter(found.items()))
        about = "" if what == "stage" else f" in {view.stage}"
        yield Finding(
            rule="loader-count",
            severity=Severity.ERROR,
            confidence=Confidence.CERTAIN,
            summary=f"Ranks have different loaders to go through; the {what}{about} is {spread(groups)}.",
            ranks=deviating(found.values()),
            evidence=differing_evidence(found),
            remedy=_REMEDY,
        )
