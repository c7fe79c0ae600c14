"""The cause sampler-disagreement: the samplers that split the data among ranks do not fit together."""

from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import SamplerFacts
from lightning_ncclsafe.rules.kit import (
    CONTENTS,
    Differences,
    Evidence,
    Finding,
    JobData,
    JobLoader,
    Questions,
    Severity,
    agreement_rule,
    batches_words,
    capitalised,
    clause,
    deviating,
    differences,
    differing_evidence,
    differing_words,
    disagreement,
    grouped,
    joined,
)

_QUESTIONS: Questions[SamplerFacts] = {
    "class": lambda sampler: sampler.name,
    "replicas": lambda sampler: sampler.replicas,
    "shuffle": lambda sampler: sampler.shuffle,
    "drop_last": lambda sampler: sampler.drop_last,
}
_OF_SHUFFLING: Questions[SamplerFacts] = {
    "seed": lambda sampler: sampler.seed,
    "epoch": lambda sampler: sampler.epoch,
}
# What a sampler of the user's own may well have different on purpose, to draw with replacement for instance.
_OF_CHOICE = {"shuffle", *_OF_SHUFFLING}
# PyTorch's, Lightning's wrappers of it: one permutation is drawn on all ranks, and each takes a part of it.
_OF_TORCH = {
    "DistributedSampler",
    "DistributedSamplerWrapper",
    "UnrepeatedDistributedSampler",
    "UnrepeatedDistributedSamplerWrapper",
}
_NO_SAMPLER = SamplerFacts(name="")
_LISTED = 4


class _Wrong(NamedTuple):
    """Something that is wrong with replicas and shares, in words."""

    text: str
    ranks: tuple[int, ...]
    certain: bool = True


@agreement_rule(
    after="different-peers",
    remedy=(
        "Make the sampler alike on all ranks: DistributedSampler(dataset, num_replicas=number of data-parallel ranks, "
        "rank=data-parallel rank, seed=a fixed number), with set_epoch called on all ranks; or leave it to Lightning."
    ),
)
def sampler_disagreement(view: JobData) -> Iterator[Finding]:
    """Ranks split the data by samplers of different settings, among another number of ranks, or take the same share.

    Symptom:
        Samples are read by several ranks or by none; where the number of replicas differs, the run hangs.

    Cause:
        A sampler that is made by hand with a seed, rank or world size of this process or host.

    Remedy:
        Make the sampler alike on all ranks, or leave it to Lightning.

    Cannot see:
        How a sampler of the user's own class works.
    """
    for loader in view.loaders:
        found = _differing(loader)
        wrong = tuple(_wrong(view, loader, found))
        if found or wrong:
            yield _finding(loader, found, wrong)


def sampler_errors(loader: JobLoader) -> Differences:
    """The settings in which samplers differ that split the data, unless it may be meant so."""
    found = _differing(loader)
    return {} if set(found) <= _OF_CHOICE and not _is_of_torch(loader) else found


def _is_of_torch(loader: JobLoader) -> bool:
    return any(sampler.name in _OF_TORCH for sampler in _samplers(loader).values())


def _differing(loader: JobLoader) -> Differences:
    """The settings in which samplers differ; the seed is one only where it is used."""
    if not loader.replicated:
        return {}
    samplers = _samplers(loader)
    shuffles = any(sampler.shuffle is not False for sampler in samplers.values())
    return differences(samplers, {**_QUESTIONS, **(_OF_SHUFFLING if shuffles else {})})


def _samplers(loader: JobLoader) -> dict[int, SamplerFacts]:
    return {rank: facts.sampler or _NO_SAMPLER for rank, facts in loader.facts.items()}


def _wrong(view: JobData, loader: JobLoader, found: Differences) -> Iterator[_Wrong]:
    """What is wrong with replicas and shares, each in words with its ranks."""
    if not loader.replicated:
        return
    samplers = _samplers(loader)
    if "replicas" not in found:
        certain = not loader.split_among_fewer or _is_read_twice(view, loader)
        yield from _replicas(view, samplers, certain)
        yield from _shares(view, samplers, certain)
    outside = tuple(rank for rank, sampler in samplers.items() if _is_outside(sampler))
    if outside:
        yield _Wrong(clause(outside, "takes|take a share that does not exist"), outside)


def _is_read_twice(view: JobData, loader: JobLoader) -> bool:
    """Whether ranks that take the same share are seen to have the same data, and not only data of the same size."""
    samplers = _samplers(loader)
    for kind in set(loader.kinds) & CONTENTS:
        seen = {
            rank: (samplers[rank].rank, facts.fingerprints[kind], view.hosts[rank] if kind == "paths" else "")
            for rank, facts in loader.facts.items()
        }
        if any(_several(view, ranks) for _, ranks in grouped(seen).parts):
            return True
    return False


def _replicas(view: JobData, samplers: dict[int, SamplerFacts], certain: bool) -> Iterator[_Wrong]:
    """Only asked where all ranks have the same number of replicas."""
    ranks = tuple(rank for rank, sampler in samplers.items() if sampler.replicas != view.data[rank].data_ranks)
    if ranks:
        replicas, expected = samplers[ranks[0]].replicas, view.data[ranks[0]].data_ranks
        yield _Wrong(f"it splits the data among {replicas} replicas where {expected} ranks read data", ranks, certain)


def _shares(view: JobData, samplers: dict[int, SamplerFacts], certain: bool) -> Iterator[_Wrong]:
    shares = grouped({rank: sampler.rank for rank, sampler in samplers.items()})
    doubled = [(share, ranks) for share, ranks in shares.parts if share is not None and _several(view, ranks)]
    if doubled:
        listed = [f"{clause(ranks, 'takes|take share')} {share}" for share, ranks in doubled]
        more = [f"{len(doubled) - _LISTED:,} more shares are taken twice"] if len(doubled) > _LISTED else []
        doubling = tuple(rank for _, ranks in doubled for rank in ranks)
        yield _Wrong(", ".join([*listed[:_LISTED], *more]), doubling, certain)


def _several(view: JobData, ranks: tuple[int, ...]) -> bool:
    """Ranks of one data rank, such as tensor-parallel peers, are to read the same share."""
    return len({view.data[rank].data_rank for rank in ranks}) > 1


def _is_outside(sampler: SamplerFacts) -> bool:
    return None not in (sampler.rank, sampler.replicas) and not 0 <= (sampler.rank or 0) < (sampler.replicas or 1)


def _finding(loader: JobLoader, found: Differences, wrong: tuple[_Wrong, ...]) -> Finding:
    is_error = bool(sampler_errors(loader)) or any(one.certain for one in wrong)
    listed = "; ".join([*([differing_words(found)] if found else []), *(one.text for one in wrong)])
    text = f"The samplers that split the {loader.name} among ranks do not fit together: {listed}."
    return disagreement(
        tuple(sorted({*deviating(found.values()), *(rank for one in wrong for rank in one.ranks)})),
        joined((text, batches_words(loader))),
        severity=Severity.ERROR if is_error else Severity.WARNING,
        evidence=(
            *differing_evidence(found),
            *(Evidence(source="loader", text=f"{capitalised(one.text)}.") for one in wrong),
        ),
    )
