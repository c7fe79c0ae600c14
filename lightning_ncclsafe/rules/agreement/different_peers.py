"""The cause different-peers: tensor-parallel peers, which share one part of the data, do not read the same."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    Differences,
    Finding,
    JobData,
    JobLoader,
    agreement_rule,
    batches_words,
    deviating,
    differences,
    differing_evidence,
    differing_words,
    disagreement,
    joined,
)

# Where a rank keeps its copy of the data is its own affair.
_OWN = "paths"
# Of data that a sampler splits, all that is in it has been compared between all ranks.
_OF_SPLIT = {"first batches"}


@agreement_rule(
    after="different-data",
    remedy=(
        "Give the ranks of one tensor-parallel group the same data in the same order: call seed_everything(seed) "
        "before the data is made, leave use_distributed_sampler=True, and choose shards by the data-parallel rank, "
        "trainer.strategy.distributed_sampler_kwargs['rank'], never by trainer.global_rank."
    ),
)
def different_peers(view: JobData) -> Iterator[Finding]:
    """Tensor-parallel peers, or other ranks that are one data-parallel rank together, do not read the same data.

    Symptom:
        Nothing hangs: each peer computes its part of a layer for another batch, and the results are added up to
        nonsense. With different numbers of batches the run hangs at the end of an epoch.

    Cause:
        A shard, a split or an order that is drawn or chosen by the global rank instead of the data-parallel rank.

    Remedy:
        Seed alike on all ranks; choose shards by the data-parallel rank.

    Cannot see:
        Augmentation, and what an IterableDataset of known length gives.
    """
    for loader in view.loaders:
        found = peer_differences(view, loader)
        if found:
            yield _finding(loader, found)


def peer_differences(view: JobData, loader: JobLoader) -> Differences:
    """What differs within a group of peers, each named with its data-parallel rank; nothing where nobody has peers."""
    found: Differences = {}
    for data_rank, ranks in view.by(lambda data: data.data_rank).parts:
        if len(ranks) > 1:
            differ = _differing(view, loader, ranks)
            found |= {f"of data-parallel rank {data_rank} the {name}": groups for name, groups in differ.items()}
    return found


def _differing(view: JobData, loader: JobLoader, ranks: tuple[int, ...]) -> Differences:
    kinds = set(loader.kinds) & _OF_SPLIT if loader.replicated else set(loader.kinds) - {_OWN}
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


def _finding(loader: JobLoader, found: Differences) -> Finding:
    text = (
        f"Ranks that are one data-parallel rank together have to read the same of the {loader.name}, and do not: "
        f"{differing_words(found)}."
    )
    return disagreement(
        deviating(found.values()), joined((text, batches_words(loader))), evidence=differing_evidence(found)
    )
