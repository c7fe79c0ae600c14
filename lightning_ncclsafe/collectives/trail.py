"""Where the main thread has been: the phases of its steps, written down as they change."""

from collections import deque
from time import time_ns
from typing import NamedTuple

from lightning_ncclsafe.timing.step_phases import STEP_PHASES, step_phase

# Some minutes' worth, should nobody read them.
_MOST_MARKS = 1 << 16
_BATCH_IS_FETCHED = ("_dataloader_next", "].val_next", "].test_next", "].predict_next")


class _Meaning(NamedTuple):
    phase: int
    starts_step: bool


class Trail:
    """Listens to a :class:`~lightning_ncclsafe.phases.PhaseTracker`.

    It is called some 50 times a step by the training's main thread, and then looks up one name.

    Attributes:
        marks: Wall-clock nanoseconds and number of the phase that began then, oldest first.
        starts: Wall-clock nanoseconds at which the rank began to fetch a batch, oldest first.
    """

    def __init__(self) -> None:
        self.marks: deque[tuple[int, int]] = deque(maxlen=_MOST_MARKS)
        self.starts: deque[int] = deque(maxlen=_MOST_MARKS)
        self._meanings: dict[str, _Meaning] = {}
        self._phase = -1

    def __call__(self, action: str) -> None:
        """The innermost action is another one now."""
        try:
            phase, starts_step = self._meanings[action]
        except KeyError:
            phase, starts_step = self._meanings[action] = _meaning(action)
        if phase != self._phase:
            self._phase = phase
            self.marks.append((time_ns(), phase))
        if starts_step:
            self.starts.append(time_ns())


def _meaning(action: str) -> _Meaning:
    return _Meaning(STEP_PHASES.index(step_phase(action)), action.endswith(_BATCH_IS_FETCHED))
