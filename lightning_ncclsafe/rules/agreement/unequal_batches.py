"""The cause unequal-batches: ranks would run out of data at different batches."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.agreement.different_datasets import unlike
from lightning_ncclsafe.rules.agreement.different_peers import peer_differences
from lightning_ncclsafe.rules.agreement.loader_settings import setting_errors
from lightning_ncclsafe.rules.agreement.reason import reason
from lightning_ncclsafe.rules.agreement.sampler_disagreement import sampler_errors
from lightning_ncclsafe.rules.kit import (
    Finding,
    JobData,
    JobLoader,
    Severity,
    agreement_rule,
    clause,
    counted,
    disagreement,
    epoch_batches,
    joined,
    spread,
    told,
)

_POLICIES = {
    "stop_together": "With on_uneven='stop_together' all ranks stop when the first one runs out, after {least:,}.",
    "repeat": "With on_uneven='repeat' the ranks that run out begin their data again until all have had {most:,}.",
}


@agreement_rule(
    after="validation-step",
    remedy=(
        "Give every rank the same number of batches: seed every split alike, pack and filter before sharding, cut or "
        "pad shards to one length, or set drop_last=True. Where that cannot be had, on_uneven='stop_together' ends the "
        "epoch on all ranks with the first that runs out, and on_uneven='repeat' with the last."
    ),
)
def unequal_batches(view: JobData) -> Iterator[Finding]:
    """A loader has different numbers of batches on different ranks.

    Symptom:
        The run hangs at the end of the epoch, or "when saving": the ranks that have more wait for those that are done.

    Cause:
        Splits without a common seed, packing or filtering after sharding, uneven shards of an IterableDataset.

    Remedy:
        Give every rank the same number of batches, or set a policy for what is uneven.

    Cannot see:
        Numbers of batches of loaders without a length, and batches that a dataset skips while it is read.
    """
    for loader in view.loaders if not view.goes_alone else ():
        if is_uneven(loader) and not _explained(view, loader):
            yield _finding(view, loader)


def is_uneven(loader: JobLoader) -> bool:
    """Whether the number of batches is known on all ranks and differs."""
    return loader.batches.differ and all(count is not None for count, _ in loader.batches.parts)


def ends_apart(view: JobData, loader: JobLoader) -> bool:
    """Whether ranks would run out of a loader's data at different batches, and wait for one another then."""
    if view.goes_alone or not is_uneven(loader):
        return False
    return bool(_empty(view, loader)) or (view.policy not in _POLICIES and view.by(epoch_batches).differ)


def _explained(view: JobData, loader: JobLoader) -> bool:
    """Whether another error names the cause, and these numbers with it."""
    if unlike(loader) or loader.unequal_samples or peer_differences(view, loader):
        return True
    return not loader.samples.differ and bool(setting_errors(view, loader) or sampler_errors(loader))


def _empty(view: JobData, loader: JobLoader) -> tuple[int, ...]:
    """The ranks that cannot begin their data again, as there is none."""
    return tuple(rank for rank, facts in loader.facts.items() if view.policy == "repeat" and not facts.batches)


def _finding(view: JobData, loader: JobLoader) -> Finding:
    words = counted("batch")
    empty = _empty(view, loader)
    harmless = not ends_apart(view, loader)
    return disagreement(
        loader.batches.deviating,
        joined(
            (
                f"The {loader.name} has not the same number of batches on all ranks: {spread(loader.batches, words)}.",
                _nothing_to_repeat(empty) if empty else _harmless(view, loader) if harmless else "",
                reason(view, loader),
            )
        ),
        severity=Severity.WARNING if harmless else Severity.ERROR,
        evidence=told(loader.batches, words),
    )


def _nothing_to_repeat(empty: tuple[int, ...]) -> str:
    return f"With on_uneven='repeat' {clause(empty, 'has|have nothing to repeat')}."


def _harmless(view: JobData, loader: JobLoader) -> str:
    if view.policy in _POLICIES:
        counts = [count for count, _ in loader.batches.parts if count is not None]
        return _POLICIES[view.policy].format(least=min(counts), most=max(counts))
    return (
        f"As loaders are combined in mode {next(iter(view.data.values())).mode!r}, all ranks end together all the same."
    )
