"""Where the main thread has been: the phases of its steps, written down as they change."""

from collections import deque
from time import time_ns
from typing import NamedTuple

from lightning_ncclsafe.timing.step_phases import STEP_PHASES, StepPhase, step_phase

# Some minutes' worth, should nobody read them.
_MOST_MARKS = 1 << 16
# A user may have a name for every step.
_MOST_NAMES = 1000
_BATCH_IS_FETCHED = ("_dataloader_next", "].val_next", "].test_next", "].predict_next")
# Most hooks do nothing. What is shorter than this counts with what was before it.
_SHORT_NS = 50_000
_OTHER = STEP_PHASES.index(StepPhase.OTHER)


class _Meaning(NamedTuple):
    phase: int
    starts_step: bool


class PhaseHistory:
    """Listens to a :class:`~lightning_ncclsafe.probes.trainer.actions.ActionTracker`.

    It is called some 50 times a step by the training's main thread, and then looks up one name.

    Attributes:
        marks: Wall-clock nanoseconds and number of the phase that began then, oldest first, up to the last but one.
        starts: Wall-clock nanoseconds at which the rank began to fetch a batch, oldest first.
        current: The same as in ``marks`` of the phase that the rank is in.
    """

    def __init__(self) -> None:
        self.marks: deque[tuple[int, int]] = deque(maxlen=_MOST_MARKS)
        self.starts: deque[int] = deque(maxlen=_MOST_MARKS)
        self.current = (time_ns(), _OTHER)
        self._meanings: dict[str, _Meaning] = {}
        self._fetches = False

    def __call__(self, action: str) -> None:
        """The innermost action is another one now."""
        try:
            phase, starts_step = self._meanings[action]
        except (KeyError, TypeError):  # a user's profiler may name things by anything
            phase, starts_step = self._learn(action)
        # What is between two hooks belongs to the first.
        if phase not in (_OTHER, self.current[1]):
            now_ns = time_ns()
            if now_ns - self.current[0] >= _SHORT_NS:
                self.marks.append(self.current)
            self.current = (now_ns, phase)
        # What is done within a fetch leaves the fetch as the innermost action again.
        if starts_step and not self._fetches:
            self.starts.append(time_ns())
        self._fetches = starts_step or (self._fetches and phase != _OTHER)

    def _learn(self, action: object) -> _Meaning:
        meaning = _meaning(str(action))
        if isinstance(action, str) and len(self._meanings) < _MOST_NAMES:
            self._meanings[action] = meaning
        return meaning


def _meaning(action: str) -> _Meaning:
    return _Meaning(STEP_PHASES.index(step_phase(action)), action.endswith(_BATCH_IS_FETCHED))
