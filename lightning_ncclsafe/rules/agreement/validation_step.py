"""The cause validation-step: ranks would begin validation after different training batches."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    TRAIN,
    Finding,
    Groups,
    JobData,
    agreement_rule,
    counted,
    disagreement,
    spread,
    told,
)


@agreement_rule(
    after="loader-settings",
    remedy=(
        "Give every rank the same val_check_interval and the same number of training batches: a fraction is taken of "
        "this rank's own number."
    ),
)
def validation_step(view: JobData) -> Iterator[Finding]:
    """Validation would not start after the same training batch on all ranks.

    Symptom:
        In the middle of an epoch one rank validates while the others train, and all wait for each other.

    Cause:
        A val_check_interval that is worked out on each rank, or a fraction of unequal numbers of batches.

    Remedy:
        Give every rank the same val_check_interval and the same number of training batches.

    Cannot see:
        Intervals in time, and those of loaders without a length.
    """
    steps = view.by(lambda data: data.val_check_batch)
    if view.stage == TRAIN and steps.differ and not _follows(view):
        yield _finding(steps)


def _follows(view: JobData) -> bool:
    """Whether the steps differ only because the loaders do, which other findings say."""
    if view.by(lambda data: (data.stage, len(data.loaders), data.mode)).differ:
        return True
    # With a policy for uneven data the run goes on, with a length that ranks agree on, and Lightning works out the step
    # from that one.
    return any(loader.batches.differ for loader in view.loaders)


def _finding(steps: Groups[int | None]) -> Finding:
    words = counted("batch")
    return disagreement(
        steps.deviating,
        f"Ranks would begin validation after different numbers of training batches: {spread(steps, words)}.",
        evidence=told(steps, words),
    )
