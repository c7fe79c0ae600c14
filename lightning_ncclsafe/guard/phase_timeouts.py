"""A hard limit for each phase."""

from dataclasses import dataclass, fields
from datetime import timedelta

from lightning_ncclsafe.settings import seconds


@dataclass(frozen=True, kw_only=True)
class PhaseTimeouts:
    """How long a rank may wait without progress, phase by phase, before the run is ended.

    The limit is that of the phase in which a rank waits. It applies to the guard and, 15 s later, to the back end of
    every process group, from the beginning of the phase. A group that was created with a longer timeout keeps it;
    exactly 10 or 30 minutes, PyTorch's defaults, do not count as such.

    Args:
        init: Until the first batch or sanity check: creation of the process group, setup, restoring.
        sanity_check: Validation before training.
        first_batch: Until the end of the first training batch of each epoch: workers start, models are compiled.
        train: Training otherwise, hooks at an epoch's end included.
        validate: Validation.
        test: Testing.
        predict: Prediction.
        checkpoint: While a checkpoint is saved, in any phase.

    Each is a ``timedelta``, or seconds; None, the default, means the strategy's own ``timeout``.

    Raises:
        ValueError: Naming the argument, if it is not longer than 0 s or longer than 1e9 s.

    Example::

        SafeDDP(phase_timeouts=PhaseTimeouts(init=300, train=100, checkpoint=timedelta(minutes=20)))
    """

    # The number comes first, here and elsewhere: LightningCLI writes a value by the first type that takes it, and as a
    # timedelta it would write the text '300.0'.
    init: float | timedelta | None = None
    sanity_check: float | timedelta | None = None
    first_batch: float | timedelta | None = None
    train: float | timedelta | None = None
    validate: float | timedelta | None = None
    test: float | timedelta | None = None
    predict: float | timedelta | None = None
    checkpoint: float | timedelta | None = None

    def __post_init__(self) -> None:
        self.as_seconds()

    def as_seconds(self) -> dict[str, float]:
        """What has been set, in seconds, by argument."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: seconds(name, value) for name, value in given.items() if value is not None}
