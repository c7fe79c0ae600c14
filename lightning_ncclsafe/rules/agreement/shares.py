"""Ranks whose shares of the data are the same, or are split differently."""

from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import DataFacts, LoaderFacts, SamplerFacts
from lightning_ncclsafe.rules.kit import (
    CONTENTS,
    LISTED,
    TRAIN,
    Confidence,
    Differences,
    Evidence,
    Finding,
    JobData,
    JobLoader,
    Plan,
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
    ranks_words,
)

# An index identifies a sample within a dataset, which may be each rank's own.
_POSITIONS = ("indices", "batches")
# Without base names and counters: different shards may have the same names, and numbers of steps are often equal.
_CONTENTS = ("paths", "values")
# What a rank has actually read, however the data is split.
_READ = "first batches"
_LISTED_GROUPS = 4
_FIXED_ORDERS = ("sequential", "listed")
_REMEDY_SPLIT = (
    "Keep use_distributed_sampler=True in the Trainer, or give the loader a DistributedSampler, or each rank its own "
    "shard by trainer.global_rank."
)
_REMEDY_ITERATED = (
    "No sampler can split an iterable dataset. Let its __iter__ give each rank its own part: every n-th sample or file "
    "by rank, torch.distributed.get_rank(), and by worker; or, if it draws its samples at random, seed that generator "
    "with a number that depends on the rank. If a library makes the dataset, look for such an option in the library, "
    "or set these seeds before the library draws."
)
_REMEDY_EVALUATION = (
    "If these ranks should evaluate the same data, there is nothing to do; otherwise give each rank its own part."
)
_UNSPLIT = (
    "Its sampler was made for a single replica, probably before the process group existed: make it in the dataloader "
    "hook, or leave it to Lightning."
)

_Key = tuple[object, ...]


@agreement_rule(after="settings-disagreement", plan=Plan.STOP)
def same_shard(view: JobData) -> Iterator[Finding]:
    """Nothing splits the data among ranks, and several ranks read the same samples in the same order.

    Symptom:
        Nothing hangs: training on N ranks is no better than on one, as all compute the same gradients.

    Cause:
        use_distributed_sampler=False without shards, a sampler created before the process group existed, or an
        IterableDataset that yields the same on all ranks because it does not know its rank.

    Remedy:
        Let a sampler split the data, or give each rank its own shard; for an iterable dataset, in its __iter__, or by
        a seed that depends on the rank.

    Cannot see:
        Data that is iterated, before it is read; the user's own samplers; which dataset the indices point into.
    """
    for loader in view.loaders:
        shared = tuple(_shared(view, _keys(view, loader)))
        if shared and not _is_usual(view, shared):
            yield _read_alike(view, loader, shared)


def _is_usual(view: JobData, shared: tuple[tuple[int, ...], ...]) -> bool:
    """Whether every rank evaluates all data, or all data of its host, which is correct."""
    return view.stage != TRAIN and sum(map(len, shared)) == len(view.data)


def _keys(view: JobData, loader: JobLoader) -> dict[int, _Key | None]:
    """By rank, a key that is equal on ranks which read the same data; None if unknown."""
    if _READ in loader.kinds:
        return {rank: (facts.fingerprints[_READ],) for rank, facts in loader.facts.items()}
    if loader.replicated or not set(loader.kinds) & {*_POSITIONS, *_CONTENTS}:
        return {}
    if any(facts.all_alike for facts in loader.facts.values()):
        return {}  # synthetic data, for measuring speed for instance
    # The same path on two hosts may hold two shards.
    hosts = view.hosts if "paths" in loader.kinds else {}
    keys = {rank: _key(view.data[rank], facts, loader.kinds) for rank, facts in loader.facts.items()}
    return {rank: key and (hosts.get(rank), *key) for rank, key in keys.items()}


def _shared(view: JobData, keys: dict[int, _Key | None]) -> Iterator[tuple[int, ...]]:
    """The groups of ranks that read the same data, except for peers of one data rank, which should."""
    for key, ranks in grouped(keys).parts:
        if key is not None and len({view.data[rank].data_rank for rank in ranks}) > 1:
            yield ranks


def _key(data: DataFacts, facts: LoaderFacts, kinds: tuple[str, ...]) -> _Key | None:
    order = _order(data, facts.sampler) if facts.sampler is not None else None
    if order is None or facts.iterable or facts.samples == 0 or data.data_ranks < 2:
        return None
    return order, facts.datasets or facts.dataset, facts.samples, *(facts.fingerprints[kind] for kind in kinds)


def _order(data: DataFacts, sampler: SamplerFacts) -> _Key | None:
    if sampler.replicas == 1:
        return sampler.name, sampler.seed, sampler.epoch, sampler.shuffle
    if sampler.order == "random":
        digest = next((state.digest for state in data.random if state.name == "torch"), None)
        return None if digest is None else (sampler.order, digest)
    return (sampler.order,) if sampler.order in _FIXED_ORDERS else None


def _read_alike(view: JobData, loader: JobLoader, shared: tuple[tuple[int, ...], ...]) -> Finding:
    training = view.stage == TRAIN
    certain = bool({*_CONTENTS, "items", _READ} & set(loader.kinds))
    ranks = tuple(sorted(rank for group in shared for rank in group))
    text = f"{_who(view, shared, 'read' if training else 'evaluate')} the same data of the {loader.name}"
    why = "" if _READ in loader.kinds else ", as nothing splits it among ranks"
    return disagreement(
        ranks,
        joined((f"{text}{why}.", _doubt(certain), _UNSPLIT if _single(loader) else "")),
        severity=Severity.ERROR if training and certain else Severity.WARNING,
        confidence=Confidence.CERTAIN if certain else Confidence.LIKELY,
        evidence=_evidence(loader, shared),
        remedy=_remedy(loader) if training else _REMEDY_EVALUATION,
    )


def _remedy(loader: JobLoader) -> str:
    """The remedy for this kind of loader: an iterable dataset takes no sampler."""
    return _REMEDY_ITERATED if any(facts.iterable for facts in loader.facts.values()) else _REMEDY_SPLIT


def _who(view: JobData, shared: tuple[tuple[int, ...], ...], verb: str) -> str:
    if len(shared) == 1 and len(shared[0]) == len(view.data):
        return f"Every rank {verb}s"
    listed = [ranks_words(group) for group in shared[:_LISTED_GROUPS]]
    more = [f"{len(shared) - _LISTED_GROUPS:,} more groups of ranks"] if len(shared) > _LISTED_GROUPS else []
    each = "each " if len(shared) > 1 else ""
    return f"{capitalised(', as well as '.join([*listed, *more]))} {each}{verb}"


def _doubt(certain: bool) -> str:
    return "" if certain else "The indices are equal; that they point into the same dataset could not be seen."


def _single(loader: JobLoader) -> bool:
    return any(facts.sampler is not None and facts.sampler.replicas == 1 for facts in loader.facts.values())


def _evidence(loader: JobLoader, shared: tuple[tuple[int, ...], ...]) -> Iterator[Evidence]:
    for ranks in shared[:LISTED]:
        facts = loader.facts[ranks[0]]
        prints = ", ".join(f"{kind} {facts.fingerprints[kind][:8]}" for kind in loader.kinds)
        sampler = f", read by {facts.sampler.name}" if facts.sampler else ""
        yield Evidence(source="loader", text=f"{capitalised(ranks_words(ranks))}: fingerprint of {prints}{sampler}.")


_OF_SAMPLERS: Questions[SamplerFacts] = {
    "class": lambda sampler: sampler.name,
    "replicas": lambda sampler: sampler.replicas,
    "shuffle": lambda sampler: sampler.shuffle,
    "drop_last": lambda sampler: sampler.drop_last,
}
_OF_SHUFFLING: Questions[SamplerFacts] = {
    "seed": lambda sampler: sampler.seed,
    "epoch": lambda sampler: sampler.epoch,
}
# Settings that a sampler of the user's own may have different on purpose, to draw with replacement for instance.
_OF_CHOICE = {"shuffle", *_OF_SHUFFLING}
# PyTorch's sampler and Lightning's wrappers of it: all ranks draw one permutation, and each takes a part of it.
_OF_TORCH = {
    "DistributedSampler",
    "DistributedSamplerWrapper",
    "UnrepeatedDistributedSampler",
    "UnrepeatedDistributedSamplerWrapper",
}
_NO_SAMPLER = SamplerFacts(name="")
_LISTED_SHARES = 4


class _Wrong(NamedTuple):
    """An error in replicas or shares, in words."""

    text: str
    ranks: tuple[int, ...]
    certain: bool = True


@agreement_rule(
    after="different-peers",
    remedy=(
        "Make the sampler the same on all ranks: DistributedSampler(dataset, num_replicas=number of data-parallel "
        "ranks, rank=data-parallel rank, seed=a fixed number), with set_epoch called on all ranks; or leave it to "
        "Lightning."
    ),
    plan=Plan.STOP,
)
def sampler_disagreement(view: JobData) -> Iterator[Finding]:
    """The samplers of ranks have different settings or numbers of replicas, or take the same share of the data.

    Symptom:
        Samples are read by several ranks or by none; if the number of replicas differs, the run hangs.

    Cause:
        A sampler created by hand with a seed, rank or world size of this process or host.

    Remedy:
        Use identical samplers on all ranks, or leave it to Lightning.

    Cannot see:
        How a sampler of the user's own class works.
    """
    for loader in view.loaders:
        found = _differing_samplers(loader)
        wrong = tuple(_wrong(view, loader, found))
        if found or wrong:
            yield _other_shares(loader, found, wrong)


def sampler_errors(loader: JobLoader) -> Differences:
    """The differing settings of samplers that split the data, unless they may differ on purpose."""
    found = _differing_samplers(loader)
    return {} if set(found) <= _OF_CHOICE and not _is_of_torch(loader) else found


def _is_of_torch(loader: JobLoader) -> bool:
    return any(sampler.name in _OF_TORCH for sampler in _samplers(loader).values())


def _differing_samplers(loader: JobLoader) -> Differences:
    """The settings in which samplers differ; the seed counts only if it is used."""
    if not loader.replicated:
        return {}
    samplers = _samplers(loader)
    shuffles = any(sampler.shuffle is not False for sampler in samplers.values())
    return differences(samplers, {**_OF_SAMPLERS, **(_OF_SHUFFLING if shuffles else {})})


def _samplers(loader: JobLoader) -> dict[int, SamplerFacts]:
    return {rank: facts.sampler or _NO_SAMPLER for rank, facts in loader.facts.items()}


def _wrong(view: JobData, loader: JobLoader, found: Differences) -> Iterator[_Wrong]:
    """Errors in replicas and shares, each with its ranks."""
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
    """Whether ranks that take the same share are known to have the same data, and not only data of the same size."""
    samplers = _samplers(loader)
    for kind in set(loader.kinds) & CONTENTS:
        seen = {
            rank: (samplers[rank].rank, facts.fingerprints[kind], view.hosts[rank] if kind == "paths" else "")
            for rank, facts in loader.facts.items()
        }
        if any(_are_several(view, ranks) for _, ranks in grouped(seen).parts):
            return True
    return False


def _replicas(view: JobData, samplers: dict[int, SamplerFacts], certain: bool) -> Iterator[_Wrong]:
    """A number of replicas other than the number of data ranks; all ranks have the same number here."""
    ranks = tuple(rank for rank, sampler in samplers.items() if sampler.replicas != view.data[rank].data_ranks)
    if ranks:
        replicas, expected = samplers[ranks[0]].replicas, view.data[ranks[0]].data_ranks
        yield _Wrong(f"it splits the data among {replicas} replicas where {expected} ranks read data", ranks, certain)


def _shares(view: JobData, samplers: dict[int, SamplerFacts], certain: bool) -> Iterator[_Wrong]:
    shares = grouped({rank: sampler.rank for rank, sampler in samplers.items()})
    doubled = [(share, ranks) for share, ranks in shares.parts if share is not None and _are_several(view, ranks)]
    if doubled:
        listed = [f"{clause(ranks, 'takes|take share')} {share}" for share, ranks in doubled]
        more = (
            [f"{len(doubled) - _LISTED_SHARES:,} more shares are taken twice"] if len(doubled) > _LISTED_SHARES else []
        )
        doubling = tuple(rank for _, ranks in doubled for rank in ranks)
        yield _Wrong(", ".join([*listed[:_LISTED_SHARES], *more]), doubling, certain)


def _are_several(view: JobData, ranks: tuple[int, ...]) -> bool:
    """Whether these ranks have several data ranks; ranks of one, such as tensor-parallel peers, share one."""
    return len({view.data[rank].data_rank for rank in ranks}) > 1


def _is_outside(sampler: SamplerFacts) -> bool:
    return None not in (sampler.rank, sampler.replicas) and not 0 <= (sampler.rank or 0) < (sampler.replicas or 1)


def _other_shares(loader: JobLoader, found: Differences, wrong: tuple[_Wrong, ...]) -> Finding:
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
