"""The cause settings-disagreement: ranks have been told different things about this comparison."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import DataFacts, JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding, Severity
from lightning_ncclsafe.rules.kit.data import JobData, Questions, differences
from lightning_ncclsafe.rules.kit.differences import deviating, differing_evidence, differing_words

_QUESTIONS: Questions[DataFacts] = {
    "on_mismatch": lambda data: data.on_mismatch,
    "content": lambda data: data.content,
    "on_uneven": lambda data: data.on_uneven,
}
_REMEDY = "Set on_mismatch, content and on_uneven to the same values on all ranks, without a condition on the rank."


def settings_disagreement(job: JobFacts) -> Iterable[Finding]:
    """The settings of the comparison itself are not the same on all ranks.

    Symptom:
        One rank would raise or stop where another goes on, and the others would wait for it.

    Cause:
        A condition on the rank or an environment variable of one host around the settings.

    Remedy:
        Use the same settings on all ranks.

    Cannot see:
        Other settings of the Trainer.
    """
    found = differences(JobData(job).data, _QUESTIONS)
    if found:
        yield Finding(
            rule="settings-disagreement",
            severity=Severity.ERROR,
            confidence=Confidence.CERTAIN,
            summary=f"Ranks have different settings for comparing their data: {differing_words(found)}.",
            ranks=deviating(found.values()),
            evidence=differing_evidence(found),
            remedy=_REMEDY,
        )
