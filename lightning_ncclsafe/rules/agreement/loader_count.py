"""The cause loader-count: ranks have different loaders to go through."""

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
    disagreement,
    spread,
)

_QUESTIONS: Questions[DataFacts] = {
    "stage": lambda data: data.stage,
    "number of loaders": lambda data: len(data.loaders),
    "mode": lambda data: data.mode,
}


@agreement_rule(
    after="uneven-end",
    remedy=(
        "Return the same loaders in the same order and mode from the hook on every rank, an empty one where a rank has "
        "no data, and call the Trainer's methods in the same order on all ranks; look for a condition on the rank "
        "around them."
    ),
)
def loader_count(view: JobData) -> Iterator[Finding]:
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
    found = differences(view.data, _QUESTIONS)
    if found:
        what, groups = next(iter(found.items()))
        about = "" if what == "stage" else f" in {view.stage}"
        yield disagreement(
            deviating(found.values()),
            f"Ranks have different loaders to go through; the {what}{about} is {spread(groups)}.",
            evidence=differing_evidence(found),
        )
