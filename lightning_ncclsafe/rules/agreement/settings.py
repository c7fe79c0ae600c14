"""Ranks with different settings: how to make batches, what to do if data differs, when to validate."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import DataFacts, LoaderFacts
from lightning_ncclsafe.rules.kit import (
    TRAIN,
    Differences,
    Finding,
    Groups,
    Hangs,
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
    joined,
    spread_words,
    value_evidence,
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
    after="unequal-batches",
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


@agreement_rule(
    after="loader-settings",
    remedy=(
        "Give every rank the same val_check_interval and the same number of training batches: a fraction is taken of "
        "this rank's own number."
    ),
    plan=Plan.STOP,
    hangs=Hangs.LATER,
)
def validation_step(view: JobData) -> Iterator[Finding]:
    """Validation would not start after the same training batch on all ranks.

    Symptom:
        In the middle of an epoch one rank validates while the others train, and all wait for each other.

    Cause:
        A val_check_interval that each rank computes for itself, or a fraction of unequal numbers of batches.

    Remedy:
        Give every rank the same val_check_interval and the same number of training batches.

    Cannot see:
        Intervals in time, and those of loaders without a length.
    """
    steps = view.by(lambda data: data.val_check_batch)
    if view.stage == TRAIN and steps.differ and not _is_explained(view):
        yield _different_steps(steps)


def _is_explained(view: JobData) -> bool:
    """Whether the steps differ only because the loaders do, which other findings report."""
    if view.by(lambda data: (data.stage, len(data.loaders), data.mode)).differ:
        return True
    # With a policy for uneven data, ranks train with an agreed length, and Lightning computes the step from that
    # length.
    return any(loader.batches.differ for loader in view.loaders)


def _different_steps(steps: Groups[int | None]) -> Finding:
    words = count_words("batch")
    return disagreement(
        steps.deviating,
        f"Ranks would begin validation after different numbers of training batches: {spread_words(steps, words)}.",
        evidence=value_evidence(steps, words),
    )
