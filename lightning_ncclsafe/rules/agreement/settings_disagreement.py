"""The cause settings-disagreement: ranks have been told different things about this comparison."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import DataFacts
from lightning_ncclsafe.rules.kit import (
    Finding,
    JobData,
    Questions,
    agreement_rule,
    deviating,
    differences,
    differing_evidence,
    differing_words,
    disagreement,
)

_QUESTIONS: Questions[DataFacts] = {
    "on_mismatch": lambda data: data.on_mismatch,
    "content": lambda data: data.content,
    "on_uneven": lambda data: data.on_uneven,
}


@agreement_rule(
    after="unequal-batches",
    remedy="Set on_mismatch, content and on_uneven to the same values on all ranks, without a condition on the rank.",
)
def settings_disagreement(view: JobData) -> Iterator[Finding]:
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
    found = differences(view.data, _QUESTIONS)
    if found:
        yield disagreement(
            deviating(found.values()),
            f"Ranks have different settings for comparing their data: {differing_words(found)}.",
            evidence=differing_evidence(found),
        )
