"""The cause same-shard: ranks read the same data, as nothing splits it among them."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import DataFacts, LoaderFacts, SamplerFacts
from lightning_ncclsafe.rules.kit import (
    TRAIN,
    Confidence,
    Evidence,
    Finding,
    JobData,
    JobLoader,
    Severity,
    agreement_rule,
    capitalised,
    disagreement,
    grouped,
    joined,
    ranks_words,
)

# An index says which sample of a dataset, not which dataset: that may be each rank's own.
_POSITIONS = ("indices", "batches")
# Base names and counters are left out: shards of one name, or the numbers of steps, may well be the same on all ranks.
_CONTENTS = ("paths", "values")
# What a rank has really read, whatever was to split the data.
_READ = "first batches"
_LISTED = 4
_FIXED_ORDERS = ("sequential", "listed")
_REMEDY = (
    "Keep use_distributed_sampler=True in the Trainer, or give the loader a DistributedSampler, or each rank a shard "
    "of its own by trainer.global_rank."
)
_REMEDY_ITERATED = (
    "No sampler can split data that is just iterated. Let its __iter__ give each rank a part of its own: every n-th "
    "sample or file by rank, torch.distributed.get_rank(), and by worker; or, where it draws its samples at random, "
    "seed that generator with a number that depends on the rank. Where a library makes it, look for an option of the "
    "library's for that, or set these seeds before the library draws."
)
_REMEDY_EVALUATION = (
    "If these ranks are meant to evaluate the same, there is nothing to do; else give each rank a part of its own."
)
_UNSPLIT = (
    "Its sampler was made for a single replica, probably before the process group existed: make it in the dataloader "
    "hook, or leave it to Lightning."
)

_Key = tuple[object, ...]


@agreement_rule(after="settings-disagreement")
def same_shard(view: JobData) -> Iterator[Finding]:
    """Nothing splits the data among ranks, and several ranks read the same samples in the same order.

    Symptom:
        Nothing hangs: training on N ranks is no better than on one, as all compute the same gradients.

    Cause:
        use_distributed_sampler=False without shards, a sampler made before the process group existed, or an
        IterableDataset that gives all ranks the same, as nobody has told it which rank it is on.

    Remedy:
        Let a sampler split the data, or give each rank its own shard; of data that is iterated, in its __iter__, or by
        a seed that depends on the rank.

    Cannot see:
        Before it is read: data that is iterated, samplers of the user's own, and into which dataset indices point.
    """
    for loader in view.loaders:
        shared = tuple(_shared(view, _keys(view, loader)))
        if shared and not _is_usual(view, shared):
            yield _finding(view, loader, shared)


def _is_usual(view: JobData, shared: tuple[tuple[int, ...], ...]) -> bool:
    """Whether every rank evaluates everything, or the ranks of a host all that is on it: right, and nothing to do."""
    return view.stage != TRAIN and sum(map(len, shared)) == len(view.data)


def _keys(view: JobData, loader: JobLoader) -> dict[int, _Key | None]:
    """By rank, what it has in common with those that read the same; None where that cannot be told."""
    if _READ in loader.kinds:
        return {rank: (facts.fingerprints[_READ],) for rank, facts in loader.facts.items()}
    if loader.replicated or not set(loader.kinds) & {*_POSITIONS, *_CONTENTS}:
        return {}
    if any(facts.all_alike for facts in loader.facts.values()):
        return {}  # made up, to measure speed for instance
    # What has the same path on two hosts may be two shards.
    hosts = view.hosts if "paths" in loader.kinds else {}
    keys = {rank: _key(view.data[rank], facts, loader.kinds) for rank, facts in loader.facts.items()}
    return {rank: key and (hosts.get(rank), *key) for rank, key in keys.items()}


def _shared(view: JobData, keys: dict[int, _Key | None]) -> Iterator[tuple[int, ...]]:
    """The groups of ranks that read the same; peers of one data rank are to do so."""
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


def _finding(view: JobData, loader: JobLoader, shared: tuple[tuple[int, ...], ...]) -> Finding:
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
    """One that fits the loader: what is iterated takes no sampler."""
    return _REMEDY_ITERATED if any(facts.iterable for facts in loader.facts.values()) else _REMEDY


def _who(view: JobData, shared: tuple[tuple[int, ...], ...], verb: str) -> str:
    if len(shared) == 1 and len(shared[0]) == len(view.data):
        return f"Every rank {verb}s"
    listed = [ranks_words(group) for group in shared[:_LISTED]]
    more = [f"{len(shared) - _LISTED:,} more groups of ranks"] if len(shared) > _LISTED else []
    each = "each " if len(shared) > 1 else ""
    return f"{capitalised(', as well as '.join([*listed, *more]))} {each}{verb}"


def _doubt(certain: bool) -> str:
    return "" if certain else "The indices are equal; that they point into the same dataset could not be seen."


def _single(loader: JobLoader) -> bool:
    return any(facts.sampler is not None and facts.sampler.replicas == 1 for facts in loader.facts.values())


def _evidence(loader: JobLoader, shared: tuple[tuple[int, ...], ...]) -> Iterator[Evidence]:
    for ranks in shared[:8]:
        facts = loader.facts[ranks[0]]
        prints = ", ".join(f"{kind} {facts.fingerprints[kind][:8]}" for kind in loader.kinds)
        sampler = f", read by {facts.sampler.name}" if facts.sampler else ""
        yield Evidence(source="loader", text=f"{capitalised(ranks_words(ranks))}: fingerprint of {prints}{sampler}.")
