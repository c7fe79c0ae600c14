"""What a rank's Trainer has been told, and how its training loop has ended; data only."""

from dataclasses import dataclass, field
from enum import Enum


class LoopEnd(str, Enum):
    """What the state of a Trainer says of the end of its training loop; that it has ended is seen elsewhere."""

    UNKNOWN = ""
    """Nothing that a loop would end for."""
    DATA = "data"
    """The loader has no more batches, whatever its length says, or ``limit_train_batches`` is reached."""
    SHOULD_STOP = "should-stop"
    """``trainer.should_stop`` is set."""
    MAX_STEPS = "max-steps"
    """The optimizer has made ``max_steps`` steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """What decides how many steps and collectives a rank's ``fit`` makes.

    Attributes:
        settings: What all ranks have to have alike, as it was when training began: arguments of the Trainer by name,
            and ``"first epoch"`` and ``"first step"``, from which it goes on; as text.
        changed: What of these says when training ends, and is another now than it was then.
        callbacks: Class names of the Trainer's callbacks, in their order.
        validates_by_clock: Whether ``val_check_interval`` is a time, so that each rank's own clock decides.
        end: What its training loop would end for now.
        ended_at: ``"file:line in hook"`` of the lines of the user's module and callbacks that may have made it end so:
            that set ``should_stop`` or what has changed, or, where nothing else ends it, that a ``StopIteration`` may
            leave; the first 8.
        batches_begun: Training batches of this epoch that have been begun.
        batches: How many the epoch has; None where that is not known.
        validated: Batches of its last validation that are over, or of the one that it is in, of all loaders together.
    """

    settings: dict[str, str]
    changed: dict[str, str] = field(default_factory=dict)
    callbacks: tuple[str, ...] = ()
    validates_by_clock: bool = False
    end: LoopEnd = LoopEnd.UNKNOWN
    ended_at: tuple[str, ...] = ()
    batches_begun: int = 0
    batches: int | None = None
    validated: int = 0
