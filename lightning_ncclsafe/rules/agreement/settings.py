"""Ranks with different settings of their loaders, or of the comparison itself."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import DataFacts, LoaderFacts
from lightning_ncclsafe.rules.kit import (
    Differences,
    Finding,
    Hangs,
    JobData,
    JobLoader,
    Plan,
    Questions,
    Severity,
    agreement_rule,
    batches_words,
    deviating,
    differences,
    differing_evidence,
    differing_words,
    disagreement,
    joined,
)

_OF_BATCHES: Questions[LoaderFacts] = {
    "batch_size": lambda facts: facts.batch_size,
    "drop_last": lambda facts: facts.drop_last,
    # Each worker of an IterableDataset ends with its own incomplete batch; without workers there is one reader.
    "num_workers": lambda facts: max(facts.num_workers, 1) if facts.iterable else None,
}


@agreement_rule(
    after="sampler-disagreement",
    remedy=(
        "Give the loader the same settings on all ranks; if they are computed from memory, cores or the host's name, "
        "let rank 0 decide for all."
    ),
    plan=Plan.STOP,
)
def loader_settings(view: JobData) -> Iterator[Finding]:
    """Batch size, drop_last or, for data that is iterated, the number of workers differs between ranks.

    Symptom:
        The run hangs at the end of an epoch because ranks have different numbers of batches; or gradients are weighted
        wrongly.

    Cause:
        Settings that each rank computes for itself, from memory or cores for instance.

    Remedy:
        Give the loader the same settings on all ranks.

    Cannot see:
        The sizes of batches that a batch sampler of the user's own makes.
    """
    for loader in view.loaders:
        if differing := _differing(loader):
            text = f"The {loader.name} makes batches differently on some ranks: {differing_words(differing)}."
            yield disagreement(
                deviating(differing.values()),
                joined((text, batches_words(loader))),
                severity=Severity.ERROR if setting_errors(view, loader) else Severity.WARNING,
                evidence=differing_evidence(differing),
            )


def setting_errors(view: JobData, loader: JobLoader) -> Differences:
    """The settings that differ between ranks and may cause different numbers of batches."""
    return {name: groups for name, groups in _differing(loader).items() if not _may_differ(view, loader, name)}


def _may_differ(view: JobData, loader: JobLoader, name: str) -> bool:
    if view.runs_independently:
        return True  # no rank waits for another in this stage
    if name == "batch_size":
        # On purpose: ranks with different GPUs, and with data for equally many batches.
        return not loader.batches.differ and loader.batches.parts[0][0] is not None
    return name == "num_workers" and view.policy != "raise"


def _differing(loader: JobLoader) -> Differences:
    """The settings that decide how samples become batches, as far as they differ between ranks."""
    # If only some ranks iterate their data, that is the finding, and not the number of workers.
    questions = dict(_OF_BATCHES)
    if loader.by(lambda facts: facts.iterable).differ:
        del questions["num_workers"]
    return differences(loader.facts, questions)


_OF_COMPARISON: Questions[DataFacts] = {
    "on_mismatch": lambda data: data.on_mismatch,
    "content": lambda data: data.content,
    "on_uneven": lambda data: data.on_uneven,
}


@agreement_rule(
    after="uneven-batches",
    remedy="Set on_mismatch, content and on_uneven to the same values on all ranks, without a condition on the rank.",
    plan=Plan.STOP,
    hangs=Hangs.AT_ONCE,
)
def settings_disagreement(view: JobData) -> Iterator[Finding]:
    """The settings of the comparison itself differ between ranks.

    Symptom:
        One rank would raise or stop where another continues, and the others would wait for it.

    Cause:
        A condition on the rank or an environment variable of one host around the settings.

    Remedy:
        Use the same settings on all ranks.

    Cannot see:
        Other settings of the Trainer.
    """
    if differing := differences(view.data, _OF_COMPARISON):
        yield disagreement(
            deviating(differing.values()),
            f"Ranks have different settings for comparing their data: {differing_words(differing)}.",
            evidence=differing_evidence(differing),
        )
