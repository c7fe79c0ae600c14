"""Ranks that read other data than they should, or another share of it."""

from collections.abc import Callable, Iterator

from lightning_ncclsafe.facts import LoaderFacts
from lightning_ncclsafe.rules.agreement.reason import reason
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Differences,
    Finding,
    JobData,
    JobLoader,
    Plan,
    Questions,
    Severity,
    agreement_rule,
    batches_words,
    counted,
    deviating,
    differences,
    differing_evidence,
    differing_words,
    disagreement,
    grouped,
    joined,
    spread,
    told,
)

_CLASSES: Questions[LoaderFacts] = {
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
    plan=Plan.STOP,
)
def different_datasets(view: JobData) -> Iterator[Finding]:
    """The dataset, one of those below it, or the loader has a different class on some ranks.

    Symptom:
        Ranks train on different data, have different numbers of batches, or fail where a batch has another shape.

    Cause:
        A condition on the rank, a cache that exists on some hosts only, a fallback when reading fails.

    Remedy:
        Make the dataset by the same code on all ranks.

    Cannot see:
        Classes of the same name that are defined twice.
    """
    for loader in view.loaders:
        found = unlike(loader)
        if found:
            yield _other_classes(loader, found)


def unlike(loader: JobLoader) -> Differences:
    """The classes in which ranks differ; nothing where that only some have a length says it already."""
    return {} if loader.half_sized else differences(loader.facts, _CLASSES)


def _other_classes(loader: JobLoader, found: Differences) -> Finding:
    text = f"The {loader.name} reads different classes of data on some ranks: {differing_words(found)}."
    return disagreement(
        deviating(found.values()), joined((text, batches_words(loader))), evidence=differing_evidence(found)
    )


OWN_SHARDS = "If each rank should have its own shard, set use_distributed_sampler=False in the Trainer."


@agreement_rule(
    after="different-datasets",
    remedy=(
        "Let every rank hold the same whole dataset: call seed_everything(seed) before any split, sort lists of files, "
        f"and filter by the content of the data, not by anything that depends on the rank or the host. {OWN_SHARDS}"
    ),
    plan=Plan.STOP,
)
def unequal_samples(view: JobData) -> Iterator[Finding]:
    """A sampler splits the data among ranks, but the number of samples differs between them.

    Symptom:
        The run hangs at the end of an epoch, or samples are read twice, or by no rank, and nobody notices.

    Cause:
        Splits without a common seed, files that exist on some hosts only, a filter that depends on the rank.

    Remedy:
        Make the whole dataset identical on all ranks, or switch the sampler off if each rank has its own shard.

    Cannot see:
        Data without a length.
    """
    for loader in view.loaders:
        if loader.unequal_samples and not unlike(loader):
            yield _other_samples(view, loader)


def _other_samples(view: JobData, loader: JobLoader) -> Finding:
    words = counted("sample")
    text = (
        f"The {loader.name}'s data is split among ranks by a sampler and differs in size between them: "
        f"{spread(loader.samples, words)}."
    )
    return disagreement(
        loader.samples.deviating,
        joined((text, batches_words(loader), reason(view, loader))),
        evidence=told(loader.samples, words),
    )


# What comes out of a loader is a rank's own share, also where the data is the same on all ranks; so is the place where
# it keeps its copy.
_OWN_PRINTS = ("first batches", "paths")
_SOURCES = ("files", "names", "values")
_REMEDY_SAME_DATA = (
    "Let every rank hold the same data in the same order: call seed_everything(seed) before any split, give a split's "
    f"own generator a fixed seed, and sort lists of files. {OWN_SHARDS}"
)
_AUGMENTATION = (
    "An augmentation that depends on the rank looks the same; if these samples are meant to differ, there is nothing "
    "to do."
)


@agreement_rule(after="unequal-samples", plan=Plan.STOP)
def different_data(view: JobData) -> Iterator[Finding]:
    """A sampler splits the data among ranks, but they hold different data of the same size.

    Symptom:
        Nothing hangs: training samples leak into validation, some are read by several ranks and others by none.

    Cause:
        Every rank split its data by itself, without a common seed, or lists files in a different order.

    Remedy:
        Seed every split alike and sort lists of files.

    Cannot see:
        Data that could not be fingerprinted on all ranks.
    """
    for loader in view.loaders:
        if loader.replicated and not loader.unequal_samples and not unlike(loader):
            found = _differing_prints(loader)
            if found:
                yield _other_data(view, loader, found)


def _differing_prints(loader: JobLoader) -> Differences:
    """The kinds that differ. Items of one and the same data differ only by what is done to them after reading."""
    all_kinds = {kind: grouped(_prints(loader, kind)) for kind in loader.kinds if kind not in _OWN_PRINTS}
    same_source = any(kind in all_kinds and not all_kinds[kind].differ for kind in _SOURCES)
    found: Differences = {kind: groups for kind, groups in all_kinds.items() if groups.differ}
    return {} if same_source and set(found) == {"items"} else found


def _prints(loader: JobLoader, kind: str) -> dict[int, object]:
    return {rank: facts.fingerprints[kind] for rank, facts in loader.facts.items()}


def _other_data(view: JobData, loader: JobLoader, found: Differences) -> Finding:
    only_items = set(found) == {"items"}
    listed = "; ".join(f"fingerprint of {kind}: {spread(groups, _short)}" for kind, groups in found.items())
    text = f"The {loader.name}'s data is split among ranks by a sampler and differs between them ({listed})."
    return disagreement(
        deviating(found.values()),
        joined((text, "" if only_items else reason(view, loader))),
        severity=Severity.WARNING if only_items else Severity.ERROR,
        confidence=Confidence.LIKELY if only_items else Confidence.CERTAIN,
        evidence=tuple(item for kind, groups in found.items() for item in told(groups, _words(kind))),
        remedy=joined((_REMEDY_SAME_DATA, _AUGMENTATION if only_items else "")),
    )


def _short(fingerprint: object) -> str:
    return str(fingerprint)[:8]


def _words(kind: str) -> Callable[[object], str]:
    return lambda fingerprint: f"fingerprint of {kind} {_short(fingerprint)}"


# Where a rank keeps its copy of the data is its own affair.
_OWN_COPY = "paths"
# Of data that a sampler splits, all that is in it has been compared between all ranks.
_OF_SPLIT = {"first batches"}


@agreement_rule(
    after="different-data",
    remedy=(
        "Give the ranks of one tensor-parallel group the same data in the same order: call seed_everything(seed) "
        "before the data is made, leave use_distributed_sampler=True, and choose shards by the data-parallel rank, "
        "trainer.strategy.distributed_sampler_kwargs['rank'], never by trainer.global_rank."
    ),
    plan=Plan.STOP,
)
def different_peers(view: JobData) -> Iterator[Finding]:
    """Tensor-parallel peers, or other ranks that form one data-parallel rank, read different data.

    Symptom:
        Nothing hangs: each peer computes its part of a layer for a different batch, and the sum of the results is
        meaningless. With different numbers of batches the run hangs at the end of an epoch.

    Cause:
        A shard, a split or an order that is drawn or chosen by the global rank instead of the data-parallel rank.

    Remedy:
        Seed alike on all ranks; choose shards by the data-parallel rank.

    Cannot see:
        Augmentation, and what an IterableDataset of known length yields.
    """
    for loader in view.loaders:
        found = peer_differences(view, loader)
        if found:
            yield _other_peers(loader, found)


def peer_differences(view: JobData, loader: JobLoader) -> Differences:
    """What differs within a group of peers, each named with its data-parallel rank; nothing where nobody has peers."""
    found: Differences = {}
    for data_rank, ranks in view.by(lambda data: data.data_rank).parts:
        if len(ranks) > 1:
            differ = _differing_of_peers(view, loader, ranks)
            found |= {f"of data-parallel rank {data_rank} the {name}": groups for name, groups in differ.items()}
    return found


def _differing_of_peers(view: JobData, loader: JobLoader, ranks: tuple[int, ...]) -> Differences:
    kinds = set(loader.kinds) & _OF_SPLIT if loader.replicated else set(loader.kinds) - {_OWN_COPY}
    facts = {rank: loader.facts[rank] for rank in ranks}
    found = differences(
        facts,
        {
            "number of batches": lambda one: one.batches,
            "number of samples": lambda one: one.samples,
        },
    )
    prints = {rank: one.fingerprints for rank, one in facts.items()}
    for kind in sorted(kinds):
        found |= differences(prints, {f"fingerprint of {kind}": lambda one, kind=kind: one[kind][:8]})  # type: ignore[misc]
    return found | differences({rank: _drawn_order(view, loader, rank) for rank in ranks}, {"random order": str})


def _drawn_order(view: JobData, loader: JobLoader, rank: int) -> str:
    """Of the state that the order of the samples is drawn from; empty where it is not drawn from torch's global one."""
    sampler = loader.facts[rank].sampler
    if sampler is None or sampler.order != "random":
        return ""
    return next((state.digest[:8] for state in view.data[rank].random if state.name == "torch"), "")


def _other_peers(loader: JobLoader, found: Differences) -> Finding:
    text = (
        f"Ranks that form one data-parallel rank must read the same part of the {loader.name}, but do not: "
        f"{differing_words(found)}."
    )
    return disagreement(
        deviating(found.values()), joined((text, batches_words(loader))), evidence=differing_evidence(found)
    )
