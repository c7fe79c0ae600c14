"""Samples of the stack of a training thread that makes no progress: they show which line of a loop takes longest."""

from collections.abc import Hashable

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process.stacks import main_thread_stack
from lightning_ncclsafe.rules.kit.landmarks import is_in_wait

# A loop has a few lines; recursion may have any number of stacks.
_MOST_PATHS = 64

_Path = tuple[tuple[str, str, int], ...]
_Samples = tuple[int, tuple[Frame, ...]]
_NONE: _Samples = (0, ())


class StackSamples:
    """Stacks since the last progress; one from before says nothing about what the thread does now."""

    def __init__(self) -> None:
        # With the position, the number of samples and the latest stack of each path: in one attribute, so that a reader
        # on another thread sees samples of one position.
        self._since: tuple[Hashable, dict[_Path, _Samples]] = (None, {})

    def note(self, position: Hashable) -> None:
        """Takes a sample, or forgets all if the position, which changes with any progress, is another one."""
        since, samples = self._since
        if position != since:
            self._since = position, {}
            return
        stack = main_thread_stack()
        path = _path(stack)
        if path in samples or len(samples) < _MOST_PATHS:
            samples[path] = samples.get(path, _NONE)[0] + 1, stack

    def usual(self, stack: tuple[Frame, ...], position: Hashable) -> tuple[Frame, ...]:
        """The stack at the line of the same functions at which the thread was at least twice as often as where it is.

        The present stack if there is none, if it waits for other ranks, or if there was progress since the last sample.
        """
        now, (since, samples) = _path(stack), self._since
        if position != since or is_in_wait(stack):
            return stack
        alike = [sample for path, sample in [*samples.items()] if _functions(path) == _functions(now)]
        count, most = max(alike, key=lambda sample: sample[0], default=(0, stack))
        # The present stack is a sample, too.
        return most if count >= 2 * (samples.get(now, _NONE)[0] + 1) else stack


def _path(stack: tuple[Frame, ...]) -> _Path:
    return tuple((frame.file, frame.function, frame.line) for frame in stack if frame.user)


def _functions(path: _Path) -> tuple[tuple[str, str], ...]:
    return tuple((file, function) for file, function, _ in path)
