"""Ranks that have different numbers of loaders, samples or batches."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import DataFacts, LoaderFacts
from lightning_ncclsafe.rules.agreement.contents import differing_classes, peer_differences
from lightning_ncclsafe.rules.agreement.presence import is_of_length
from lightning_ncclsafe.rules.agreement.reason import reason
from lightning_ncclsafe.rules.agreement.settings import setting_errors
from lightning_ncclsafe.rules.agreement.shares import sampler_errors
from lightning_ncclsafe.rules.kit import (
    Evidence,
    Finding,
    Hangs,
    JobData,
    JobLoader,
    Plan,
    Questions,
    Severity,
    agreement_rule,
    clause,
    count_words,
    deviating,
    differences,
    differing_evidence,
    disagreement,
    epoch_batches,
    grouped,
    joined,
    ranks_words,
    spread_words,
    value_evidence,
    value_words,
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
    plan=Plan.STOP,
    hangs=Hangs.AT_ONCE,
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
        Loaders that the user's own code creates and iterates by itself.
    """
    differing = differences(view.data, _QUESTIONS)
    if differing:
        what, groups = next(iter(differing.items()))
        about = "" if what == "stage" else f" in {view.stage}"
        yield disagreement(
            deviating(differing.values()),
            f"Ranks have different loaders to go through; the {what}{about} is {spread_words(groups)}.",
            evidence=differing_evidence(differing),
        )


@agreement_rule(
    after="unpresented-loader",
    remedy=(
        "Use the same class of dataset and loader on all ranks, and give it __len__ on all of them or on none. An "
        "empty shard needs the same class as a full one."
    ),
    plan=Plan.STOP,
    hangs=Hangs.IF_UNEVEN,
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
        Whether a given length is correct.
    """
    for loader in view.loaders:
        readable = {rank: facts for rank, facts in loader.facts.items() if not _has_failed(facts)}
        if grouped({rank: facts.length is None for rank, facts in readable.items()}).differ:
            yield _half_sized(loader)


def _has_failed(facts: LoaderFacts) -> bool:
    """Whether asking for the length raised, which is a finding of its own."""
    return any(is_of_length(text) for text in facts.problems)


def _half_sized(loader: JobLoader) -> Finding:
    groups = loader.by(lambda facts: ("no length" if facts.length is None else "a length", facts.dataset))
    sized = loader.by(lambda facts: facts.length is None)
    return disagreement(
        sized.deviating,
        f"The {loader.name} has a length on some ranks only: {spread_words(groups, _words)}.",
        evidence=value_evidence(groups, _words),
    )


def _words(value: tuple[str, str]) -> str:
    sized, dataset = value
    return f"{sized} ({value_words(dataset)})" if dataset else sized


_POLICIES = {
    "stop_together": "With on_uneven='stop_together' all ranks stop when the first one runs out, after {least:,}.",
    "repeat": "With on_uneven='repeat' the ranks that run out restart their data until all have had {most:,}.",
}


@agreement_rule(
    after="validation-step",
    remedy=(
        "Give every rank the same number of batches: seed every split alike, pack and filter before sharding, cut or "
        "pad shards to one length, or set drop_last=True. If that is not possible, on_uneven='stop_together' ends the "
        "epoch on all ranks with the first that runs out, and on_uneven='repeat' with the last."
    ),
    plan=Plan.STOP,
    hangs=Hangs.IF_UNEVEN,
)
def unequal_batches(view: JobData) -> Iterator[Finding]:
    """A loader has different numbers of batches on different ranks.

    Symptom:
        The run hangs at the end of the epoch, or "when saving": the ranks that have more batches wait for those that
        are done.

    Cause:
        Splits without a common seed, packing or filtering after sharding, uneven shards of an IterableDataset.

    Remedy:
        Give every rank the same number of batches, or set a policy for uneven data.

    Cannot see:
        Numbers of batches of loaders without a length, and batches that a dataset skips while it is read.
    """
    for loader in view.loaders if not view.runs_independently else ():
        if is_uneven(loader) and not _is_explained(view, loader):
            yield _different_batches(view, loader)


def is_uneven(loader: JobLoader) -> bool:
    """Whether the number of batches is known on all ranks and differs."""
    return loader.batches.differ and all(count is not None for count, _ in loader.batches.parts)


def ends_unevenly(view: JobData, loader: JobLoader) -> bool:
    """Whether ranks would run out of a loader's data at different batches and then wait for each other."""
    if view.runs_independently or not is_uneven(loader):
        return False
    return bool(_empty(view, loader)) or (view.policy not in _POLICIES and view.by(epoch_batches).differ)


def _is_explained(view: JobData, loader: JobLoader) -> bool:
    """Whether another finding names the cause of these numbers."""
    if differing_classes(loader) or loader.unequal_samples or peer_differences(view, loader):
        return True
    return not loader.samples.differ and bool(setting_errors(view, loader) or sampler_errors(loader))


def _empty(view: JobData, loader: JobLoader) -> tuple[int, ...]:
    """The ranks without data, which cannot restart it under ``on_uneven="repeat"``."""
    return tuple(rank for rank, facts in loader.facts.items() if view.policy == "repeat" and not facts.batches)


def _different_batches(view: JobData, loader: JobLoader) -> Finding:
    words = count_words("batch")
    empty = _empty(view, loader)
    harmless = not ends_unevenly(view, loader)
    return disagreement(
        loader.batches.deviating,
        joined(
            (
                f"The {loader.name} differs in the number of batches between ranks: "
                f"{spread_words(loader.batches, words)}.",
                _nothing_to_repeat(empty) if empty else _harmless(view, loader) if harmless else "",
                reason(view, loader),
            )
        ),
        severity=Severity.WARNING if harmless else Severity.ERROR,
        evidence=value_evidence(loader.batches, words),
    )


def _nothing_to_repeat(empty: tuple[int, ...]) -> str:
    return f"With on_uneven='repeat' {clause(empty, 'has|have nothing to repeat')}."


def _harmless(view: JobData, loader: JobLoader) -> str:
    if view.policy in _POLICIES:
        counts = [count for count, _ in loader.batches.parts if count is not None]
        return _POLICIES[view.policy].format(least=min(counts), most=max(counts))
    return f"As loaders are combined in mode {next(iter(view.data.values())).mode!r}, all ranks still end together."


_LISTED = 8
_END_POLICIES = {
    "raise": "All ranks stop here.",
    "stop_together": "With on_uneven='stop_together' this pass over the data ends here for all of them.",
    "repeat": "With on_uneven='repeat' the short ones restart their data until the longest has ended.",
}


@agreement_rule(
    remedy=(
        "Give every rank the same number of batches: shards of one length, no filter that drops more on one rank than "
        "on another, the same number of loader workers. If that is not possible, "
        "DatasetAgreement(on_uneven='stop_together') ends each epoch on all ranks with the first that runs out, and "
        "on_uneven='repeat' with the last."
    ),
    plan=Plan.STOP,
)
def uneven_end(view: JobData) -> Iterator[Finding]:
    """Data of unknown length ended on some ranks before the others.

    Symptom:
        Without a vote on the next batch: the run hangs at the end of an epoch, or ranks drift apart by an epoch.

    Cause:
        Shards of unequal length, samples that are dropped while they are read, packing.

    Remedy:
        Make the shards equally long, or set a policy for uneven data.

    Cannot see:
        How many batches the others still have.
    """
    for loader in view.loaders:
        ended = tuple(rank for rank, facts in loader.facts.items() if facts.ended)
        if ended and len(ended) < len(loader.facts):
            yield _ended_unevenly(view, loader, ended)


def _ended_unevenly(view: JobData, loader: JobLoader, ended: tuple[int, ...]) -> Finding:
    others = tuple(rank for rank in loader.facts if rank not in set(ended))
    text = (
        f"The {loader.name} has ended on {ranks_words(ended)} after {_counts(loader, ended)} batches, while "
        f"{clause(others, 'has|have had')} {_counts(loader, others)} and may have more."
    )
    return disagreement(
        _odd_ones(loader, ended, others) if view.policy == "raise" else ended,
        joined((text, _END_POLICIES.get(view.policy, ""))),
        severity=Severity.ERROR if view.policy == "raise" else Severity.WARNING,
        evidence=tuple(_evidence(loader, rank) for rank in [*ended, *others][:_LISTED]),
    )


def _odd_ones(loader: JobLoader, ended: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that have ended; or the others, if most have ended after equally many batches."""
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
        text=f"Has had {facts.read or 0:,} batches{' and has no more' if facts.ended else ' so far'}.",
    )
