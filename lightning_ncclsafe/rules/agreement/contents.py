"""Ranks that read the wrong data, or the wrong share of it."""

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
    count_words,
    deviating,
    differences,
    differing_evidence,
    differing_words,
    disagreement,
    grouped,
    joined,
    spread_words,
    value_evidence,
)

_CLASSES: Questions[LoaderFacts] = {
    "loader": lambda facts: facts.loader,
    # Without the number of parts: more parts of one class are other contents, and no other class.
    "dataset": lambda facts: (
        tuple(name.partition(" \N{MULTIPLICATION SIGN}")[0] for name in facts.datasets) or (facts.dataset,)
    ),
    "iterable": lambda facts: facts.iterable,
}


@agreement_rule(
    after="sized-and-unsized",
    remedy=(
        "Make the dataset by the same code on all ranks: look for a condition on the rank, a cache or a path that "
        "exists on some hosts only, and a fallback that is used when reading fails."
    ),
    plan=Plan.STOP,
    is_of_data=True,
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
        if classes := differing_classes(loader):
            text = f"The {loader.name} reads different classes of data on some ranks: {differing_words(classes)}."
            yield disagreement(
                deviating(classes.values()),
                joined((text, batches_words(loader))),
                evidence=differing_evidence(classes),
            )


def differing_classes(loader: JobLoader) -> Differences:
    """The classes that differ between ranks; empty if only some have a length, which is a finding of its own."""
    return {} if loader.half_sized else differences(loader.facts, _CLASSES)


OWN_SHARDS = "If each rank should have its own shard, set use_distributed_sampler=False in the Trainer."


@agreement_rule(
    after="different-datasets",
    remedy=(
        "Let every rank hold the same whole dataset: call seed_everything(seed) before any split, sort lists of files, "
        f"and filter by the content of the data, not by anything that depends on the rank or the host. {OWN_SHARDS}"
    ),
    plan=Plan.STOP,
    is_of_data=True,
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
        if loader.unequal_samples and not differing_classes(loader):
            yield _different_samples(view, loader)


def _different_samples(view: JobData, loader: JobLoader) -> Finding:
    words = count_words("sample")
    text = (
        f"The {loader.name}'s data is split among ranks by a sampler and differs in size between them: "
        f"{spread_words(loader.samples, words)}."
    )
    return disagreement(
        loader.samples.deviating,
        joined((text, batches_words(loader), reason(view, loader))),
        evidence=value_evidence(loader.samples, words),
    )


# The first batches are a rank's own share even if the data is the same on all ranks; each rank may also keep its copy
# elsewhere.
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


@agreement_rule(after="unequal-samples", plan=Plan.STOP, is_of_data=True)
def different_data(view: JobData) -> Iterator[Finding]:
    """A sampler splits the data among ranks, but they hold different data of the same size.

    Symptom:
        Nothing hangs: training samples leak into validation, some are read by several ranks and others by none.

    Cause:
        Every rank split its data by itself, without a common seed, or lists files in a different order.

    Remedy:
        Seed every split alike and sort lists of files.

    Cannot see:
        Data that could not be fingerprinted on all ranks; arrays that differ as little as by rounding.
    """
    for loader in view.loaders:
        is_comparable = loader.replicated and not loader.unequal_samples and not differing_classes(loader)
        if is_comparable and (prints := _differing_prints(loader)):
            yield _different_data(view, loader, prints)


def _differing_prints(loader: JobLoader) -> Differences:
    """The kinds of fingerprints that differ; not items alone if the data is the same: augmentation changes them."""
    kinds = (kind for kind in loader.kinds if kind not in _OWN_PRINTS)
    all_kinds: Differences = {kind: grouped(dict[int, object](loader.prints(kind))) for kind in kinds}
    same_source = any(kind in all_kinds and not all_kinds[kind].differ for kind in _SOURCES)
    differing: Differences = {kind: groups for kind, groups in all_kinds.items() if groups.differ}
    return {} if same_source and set(differing) == {"items"} else differing


def _different_data(view: JobData, loader: JobLoader, prints: Differences) -> Finding:
    only_items = set(prints) == {"items"}
    listed = "; ".join(f"fingerprint of {kind}: {spread_words(groups, _short)}" for kind, groups in prints.items())
    text = f"The {loader.name}'s data is split among ranks by a sampler and differs between them ({listed})."
    return disagreement(
        deviating(prints.values()),
        joined((text, "" if only_items else reason(view, loader))),
        severity=Severity.WARNING if only_items else Severity.ERROR,
        confidence=Confidence.LIKELY if only_items else Confidence.CERTAIN,
        evidence=tuple(item for kind, groups in prints.items() for item in value_evidence(groups, _words(kind))),
        remedy=joined((_REMEDY_SAME_DATA, _AUGMENTATION if only_items else "")),
    )


def _short(fingerprint: object) -> str:
    return str(fingerprint)[:8]


def _words(kind: str) -> Callable[[object], str]:
    return lambda fingerprint: f"fingerprint of {kind} {_short(fingerprint)}"


# Each rank may keep its copy of the data elsewhere.
_OWN_COPY = "paths"
# Where the data is the same but for rounding, samples and batches of it may be rounded differently, too.
_AS_ROUNDED = {"items", "first batches"}
# All other fingerprints of data that a sampler splits are compared between all ranks by different-data.
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
        if differing := peer_differences(view, loader):
            yield _different_peers(loader, differing)


def peer_differences(view: JobData, loader: JobLoader) -> Differences:
    """What differs within groups of peers, named with their data-parallel rank; empty if no rank has peers."""
    every: Differences = {}
    for data_rank, ranks in view.by(lambda data: data.data_rank).parts:
        if len(ranks) > 1:
            differing = _differences_of_peers(view, loader, ranks)
            every |= {f"of data-parallel rank {data_rank} the {name}": groups for name, groups in differing.items()}
    return every


def _differences_of_peers(view: JobData, loader: JobLoader, ranks: tuple[int, ...]) -> Differences:
    kinds = set(loader.kinds) & _OF_SPLIT if loader.replicated else set(loader.kinds) - {_OWN_COPY}
    if "values" in kinds and _is_rounded(loader, ranks):
        kinds -= _AS_ROUNDED
    facts = {rank: loader.facts[rank] for rank in ranks}
    differing = differences(
        facts,
        {
            "number of batches": lambda one: one.batches,
            "number of samples": lambda one: one.samples,
        },
    )
    for kind in sorted(kinds):
        prints = loader.prints(kind)
        differing |= differences({rank: prints[rank] for rank in ranks}, {f"fingerprint of {kind}": _short})
    return differing | differences({rank: _drawn_order(view, loader, rank) for rank in ranks}, {"random order": str})


def _is_rounded(loader: JobLoader, ranks: tuple[int, ...]) -> bool:
    """Whether these ranks have the same values but for rounding."""
    own = {loader.facts[rank].fingerprints["values"] for rank in ranks}
    return len(own) > 1 == len({loader.prints("values")[rank] for rank in ranks})


def _drawn_order(view: JobData, loader: JobLoader, rank: int) -> str:
    """The digest of torch's global random state, if the order of the samples is drawn from it; else empty."""
    sampler = loader.facts[rank].sampler
    if sampler is None or sampler.order != "random":
        return ""
    return next((state.digest[:8] for state in view.data[rank].random if state.name == "torch"), "")


def _different_peers(loader: JobLoader, differing: Differences) -> Finding:
    text = (
        f"Ranks that form one data-parallel rank must read the same part of the {loader.name}, but do not: "
        f"{differing_words(differing)}."
    )
    return disagreement(
        deviating(differing.values()), joined((text, batches_words(loader))), evidence=differing_evidence(differing)
    )
