"""The cause uneven-end: the data of some rank has ended while others have more."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    Evidence,
    Finding,
    JobData,
    JobLoader,
    Severity,
    agreement_rule,
    clause,
    disagreement,
    joined,
    ranks_words,
)

_LISTED = 8
_POLICIES = {
    "raise": "All ranks stop here.",
    "stop_together": "With on_uneven='stop_together' this pass over the data ends here for all of them.",
    "repeat": "With on_uneven='repeat' the short ones begin their data again until the longest has ended.",
}


@agreement_rule(
    remedy=(
        "Give every rank the same number of batches: shards of one length, no filter that drops more on one rank than "
        "on another, the same number of loader workers. Where that cannot be had, "
        "DatasetAgreement(on_uneven='stop_together') ends each epoch on all ranks with the first that runs out, and "
        "on_uneven='repeat' with the last."
    )
)
def uneven_end(view: JobData) -> Iterator[Finding]:
    """Data of unknown length has ended on some ranks before the others.

    Symptom:
        Without a vote on the next batch: the run hangs at the end of an epoch, or ranks drift apart by an epoch.

    Cause:
        Shards of unequal length, samples that are dropped while they are read, packing.

    Remedy:
        Make shards alike, or set a policy for what is uneven.

    Cannot see:
        How many batches the others still have.
    """
    for loader in view.loaders:
        ended = tuple(rank for rank, facts in loader.facts.items() if facts.ended)
        if ended and len(ended) < len(loader.facts):
            yield _finding(view, loader, ended)


def _finding(view: JobData, loader: JobLoader, ended: tuple[int, ...]) -> Finding:
    others = tuple(rank for rank in loader.facts if rank not in set(ended))
    text = (
        f"The {loader.name} has ended on {ranks_words(ended)} after {_counts(loader, ended)} batches, while "
        f"{clause(others, 'has|have had')} {_counts(loader, others)} and may have more."
    )
    return disagreement(
        _odd_ones(loader, ended, others) if view.policy == "raise" else ended,
        joined((text, _POLICIES.get(view.policy, ""))),
        severity=Severity.ERROR if view.policy == "raise" else Severity.WARNING,
        evidence=tuple(_evidence(loader, rank) for rank in [*ended, *others][:_LISTED]),
    )


def _odd_ones(loader: JobLoader, ended: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Those that have ended, unless most have after as many batches: then it is the others that have too many."""
    is_alike = len({loader.facts[rank].read for rank in ended}) == 1
    return others if is_alike and len(ended) > len(others) else ended


def _counts(loader: JobLoader, ranks: tuple[int, ...]) -> str:
    counts = sorted({loader.facts[rank].read or 0 for rank in ranks})
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _evidence(loader: JobLoader, rank: int) -> Evidence:
    facts = loader.facts[rank]
    return Evidence(
        source="loader",
        rank=rank,
        text=f"Has had {facts.read or 0:,} batches{', and there are no more' if facts.ended else ' so far'}.",
    )
