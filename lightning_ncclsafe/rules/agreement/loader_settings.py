"""The cause loader-settings: ranks cut their data into batches differently."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import LoaderFacts
from lightning_ncclsafe.rules.kit import (
    Differences,
    Finding,
    JobData,
    JobLoader,
    Questions,
    Severity,
    agreement_rule,
    batches_words,
    deviating,
    differences,
    differing_evidence,
    differing_words,
    disagreement,
    joined,
)

_QUESTIONS: Questions[LoaderFacts] = {
    "batch_size": lambda facts: facts.batch_size,
    "drop_last": lambda facts: facts.drop_last,
    # Each worker of an IterableDataset ends with an incomplete batch of its own; without workers there is one reader.
    "num_workers": lambda facts: max(facts.num_workers, 1) if facts.iterable else None,
}


@agreement_rule(
    after="sampler-disagreement",
    remedy=(
        "Give the loader the same settings on all ranks; where they are worked out from memory, cores or the name of "
        "the host, let rank 0 decide for all."
    ),
)
def loader_settings(view: JobData) -> Iterator[Finding]:
    """Batch size, drop_last or, for data that is iterated, the number of workers is not the same on all ranks.

    Symptom:
        The run hangs at the end of an epoch, as ranks have different numbers of batches; or gradients are weighted
        wrongly.

    Cause:
        Settings that are worked out on each rank, from memory or cores for instance.

    Remedy:
        Give the loader the same settings on all ranks.

    Cannot see:
        The sizes of batches that a batch sampler of the user's own makes.
    """
    for loader in view.loaders:
        found = _differing(loader)
        if found:
            severity = Severity.ERROR if setting_errors(view, loader) else Severity.WARNING
            yield _finding(loader, found, severity)


def setting_errors(view: JobData, loader: JobLoader) -> Differences:
    """The settings that are not the same on all ranks and let these have different numbers of batches."""
    return {name: groups for name, groups in _differing(loader).items() if not _may_differ(view, loader, name)}


def _may_differ(view: JobData, loader: JobLoader, name: str) -> bool:
    if view.goes_alone:
        return True  # no rank waits for another one there
    if name == "batch_size":
        # Ranks with different GPUs, each with as much data as it needs for as many batches.
        return not loader.batches.differ and loader.batches.parts[0][0] is not None
    return name == "num_workers" and view.policy != "raise"


def _differing(loader: JobLoader) -> Differences:
    """The settings that decide how samples become batches and are not the same on all ranks."""
    # Where only some ranks iterate their data, that is the finding, and not how many workers they have for it.
    asked = dict(_QUESTIONS)
    if loader.by(lambda facts: facts.iterable).differ:
        del asked["num_workers"]
    return differences(loader.facts, asked)


def _finding(loader: JobLoader, found: Differences, severity: Severity) -> Finding:
    text = f"The {loader.name} makes batches differently on some ranks: {differing_words(found)}."
    return disagreement(
        deviating(found.values()),
        joined((text, batches_words(loader))),
        severity=severity,
        evidence=differing_evidence(found),
    )
