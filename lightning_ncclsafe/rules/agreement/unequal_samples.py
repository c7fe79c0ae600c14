"""The cause unequal-samples: data that a sampler splits among ranks has not the same size on all of them."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.agreement.different_datasets import unlike
from lightning_ncclsafe.rules.agreement.reason import reason
from lightning_ncclsafe.rules.kit import (
    Finding,
    JobData,
    JobLoader,
    agreement_rule,
    batches_words,
    counted,
    disagreement,
    joined,
    spread,
    told,
)

OWN_SHARDS = "If each rank is meant to have a shard of its own, set use_distributed_sampler=False in the Trainer."


@agreement_rule(
    after="different-datasets",
    remedy=(
        "Let every rank hold the whole dataset, made alike: call seed_everything(seed) before any split, sort lists of "
        f"files, and filter by what the data says, not by what the rank or the host has. {OWN_SHARDS}"
    ),
)
def unequal_samples(view: JobData) -> Iterator[Finding]:
    """A sampler splits the data among ranks, and these do not hold the same number of samples.

    Symptom:
        The run hangs at the end of an epoch, or samples are read twice, or by nobody, and nobody notices.

    Cause:
        Splits without a common seed, files that exist on some hosts only, a filter that depends on the rank.

    Remedy:
        Make the whole dataset alike on all ranks, or switch the sampler off where each rank has its own shard.

    Cannot see:
        Data without a length.
    """
    for loader in view.loaders:
        if loader.unequal_samples and not unlike(loader):
            yield _finding(view, loader)


def _finding(view: JobData, loader: JobLoader) -> Finding:
    words = counted("sample")
    text = (
        f"The {loader.name}'s data is split among ranks by a sampler and has not the same size on all of them: "
        f"{spread(loader.samples, words)}."
    )
    return disagreement(
        loader.samples.deviating,
        joined((text, batches_words(loader), reason(view, loader))),
        evidence=told(loader.samples, words),
    )
