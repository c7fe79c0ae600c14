"""The cause sized-and-unsized: a loader has a length on some ranks only."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import LoaderFacts
from lightning_ncclsafe.rules.agreement.unreadable_loader import is_of_length
from lightning_ncclsafe.rules.kit import (
    Finding,
    JobData,
    JobLoader,
    agreement_rule,
    disagreement,
    grouped,
    spread,
    told,
    value_words,
)


@agreement_rule(
    after="unpresented-loader",
    remedy=(
        "Use the same class of dataset and loader on all ranks, and give it __len__ on all of them or on none. An "
        "empty shard needs the same class as a full one."
    ),
)
def sized_and_unsized(view: JobData) -> Iterator[Finding]:
    """A loader has a length on some ranks and none on others.

    Symptom:
        All ranks hang before the first batch: Lightning sums the lengths, and ranks without one do not take part.

    Cause:
        An IterableDataset on some ranks and a map-style one on others, or a __len__ that raises TypeError on some.

    Remedy:
        Give the loader a length on all ranks or on none.

    Cannot see:
        Whether a length that is given is right.
    """
    for loader in view.loaders:
        asked = {rank: facts for rank, facts in loader.facts.items() if not _failed(facts)}
        if grouped({rank: facts.length is None for rank, facts in asked.items()}).differ:
            yield _finding(loader)


def _failed(facts: LoaderFacts) -> bool:
    """Whether asking for the length raised, which is a finding of its own."""
    return any(is_of_length(text) for text in facts.problems)


def _finding(loader: JobLoader) -> Finding:
    groups = loader.by(lambda facts: ("no length" if facts.length is None else "a length", facts.dataset))
    sized = loader.by(lambda facts: facts.length is None)
    return disagreement(
        sized.deviating,
        f"The {loader.name} has a length on some ranks only: {spread(groups, _words)}.",
        evidence=told(groups, _words),
    )


def _words(value: tuple[str, str]) -> str:
    sized, dataset = value
    return f"{sized} ({value_words(dataset)})" if dataset else sized
