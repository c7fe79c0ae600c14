"""The cause different-datasets: ranks read with different classes."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import LoaderFacts
from lightning_ncclsafe.rules.kit import (
    Differences,
    Finding,
    JobData,
    JobLoader,
    Questions,
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
    "loader": lambda facts: facts.loader,
    "dataset": lambda facts: facts.datasets or (facts.dataset,),
    "iterable": lambda facts: facts.iterable,
}


@agreement_rule(
    after="sized-and-unsized",
    remedy=(
        "Make the dataset by the same code on all ranks: look for a condition on the rank, a cache or a path that "
        "exists on some hosts only, and a fallback that is used when reading fails."
    ),
)
def different_datasets(view: JobData) -> Iterator[Finding]:
    """The dataset, one of those below it, or the loader is of another class on some ranks.

    Symptom:
        Ranks train on different data, have different numbers of batches, or fail where a batch has another shape.

    Cause:
        A condition on the rank, a cache that exists on some hosts only, a fallback when reading fails.

    Remedy:
        Make the dataset by the same code on all ranks.

    Cannot see:
        Classes of one name that are defined twice.
    """
    for loader in view.loaders:
        found = unlike(loader)
        if found:
            yield _finding(loader, found)


def unlike(loader: JobLoader) -> Differences:
    """The classes in which ranks differ; nothing where that only some have a length says it already."""
    return {} if loader.half_sized else differences(loader.facts, _QUESTIONS)


def _finding(loader: JobLoader, found: Differences) -> Finding:
    text = f"The {loader.name} reads other classes of data on some ranks: {differing_words(found)}."
    return disagreement(
        deviating(found.values()), joined((text, batches_words(loader))), evidence=differing_evidence(found)
    )
