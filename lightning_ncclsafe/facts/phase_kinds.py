"""Kinds of phases of a run: how long a rank usually makes no progress differs between them."""

import re
from dataclasses import dataclass

from lightning_ncclsafe.facts import Action, Phase, Progress

FIRST_BATCH = "first_batch"
"""The name of the limit for the first training batch of an epoch: a phase for users, but not for Lightning."""

LONG_S = 300.0
"""How long phases may take that are known to take long, seconds: compilation, starting workers, checkpoints.
Compiling a large model takes some minutes, as does writing its checkpoint to shared storage."""

UNKNOWN_S = 60.0
"""From how many seconds on a wait is unusual where nothing is known yet, and in hooks that are called once an epoch or
once a run: those differ for good reasons."""

PASSING_S = 20.0
"""From how many seconds on a wait is unusual for a rank that may yet go on by itself: a download that is tried again
after pauses of 1, 2, 4 and 8 s takes 15 s."""

BATCHES_TO_KNOW = 5
"""Batches of a kind after which it is known how long they take."""

_EVALUATIONS = frozenset({Phase.SANITY_CHECK, Phase.VALIDATE, Phase.TEST, Phase.PREDICT})
# "[_TrainingEpochLoop].train_dataloader_next", "[_EvaluationLoop].val_next"
_FETCH = re.compile(r"\]\.(train|val|test|predict)(?:_dataloader)?_next$")
_IN_LOOPS = _EVALUATIONS | {Phase.TRAIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseKind:
    """What kind of phase a rank is in.

    Attributes:
        phase: The phase of the Trainer.
        first: Whether the first batch of the loop is not over: workers start, models are compiled.
        per_batch: Whether the Trainer is in something that it does for every batch, and not in a hook at the beginning
            or end of an epoch or a run, where users put work that is done once.
    """

    phase: Phase
    first: bool = False
    per_batch: bool = False

    @property
    def limit_name(self) -> str:
        """Name of the argument of ``PhaseTimeouts`` that applies."""
        return FIRST_BATCH if self.phase is Phase.TRAIN and self.first else self.phase.value

    @property
    def is_long(self) -> bool:
        """Whether such phases take long even in a healthy run."""
        if self.phase in (Phase.CHECKPOINT, Phase.SANITY_CHECK):
            return True
        return self.phase in _IN_LOOPS and self.first and self.per_batch

    @property
    def evaluates(self) -> bool:
        """Whether the Trainer runs an evaluation loop."""
        return self.phase in _EVALUATIONS


def phase_kind_of(progress: Progress) -> PhaseKind:
    """The kind of phase in a rank's facts; here the first batch is over once the second has begun."""
    return make_phase_kind(progress.phase, progress.actions, first=progress.batch_idx <= 0)


def make_phase_kind(phase: Phase, actions: tuple[Action, ...], *, first: bool) -> PhaseKind:
    """The kind of a phase, given its actions.

    Args:
        phase: The phase of the Trainer.
        actions: The current actions, outermost first.
        first: Whether the first batch of the loop is not over.
    """
    in_loop = phase in _IN_LOOPS
    return PhaseKind(
        phase=phase,
        first=first and in_loop,
        per_batch=in_loop and not any(is_occasional(action.name) for action in actions),
    )


def is_occasional(action_name: str) -> bool:
    """Whether an action is a hook that is not called for every batch: ``"[Callback]X.on_train_epoch_end"``."""
    hook = action_name.rpartition(".")[2]
    if hook.startswith("on_"):
        return hook.endswith(("_start", "_end")) and "_batch_" not in hook
    return hook in ("setup", "teardown", "prepare_data")


def stage_fetched(action_name: str) -> str:
    """The stage for which a loop fetches a batch in an action: ``"train"``, ``"val"``, …; empty for other actions."""
    found = _FETCH.search(action_name)
    return found[1] if found else ""
