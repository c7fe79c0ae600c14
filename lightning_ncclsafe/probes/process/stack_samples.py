"""Samples of the stack of a training thread that makes no progress: they show which line of a loop takes longest."""

from collections import Counter
from collections.abc import Hashable

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process.stacks import main_thread_stack
from lightning_ncclsafe.rules.kit.landmarks import is_in_wait

# A loop has a few lines; recursion may have any number of stacks.
_MOST_PATHS = 64

_Path = tuple[tuple[str, str, int], ...]


class StackSamples:
    """Stacks since the last progress; one from before says nothing about what the thread does now."""

    def __init__(self) -> None:
        self._position: Hashable = None
        self._counts: Counter[_Path] = Counter()
        self._latest: dict[_Path, tuple[Frame, ...]] = {}

    def note(self, position: Hashable) -> None:
        """Takes a sample, or forgets all if the rank has made progress."""
        if position != self._position:
            self._position, self._counts, self._latest = position, Counter(), {}
            return
        stack = main_thread_stack()
        path = _path(stack)
        if path in self._counts or len(self._counts) < _MOST_PATHS:
            self._latest[path] = stack
            self._counts[path] += 1

    def usual(self, stack: tuple[Frame, ...], position: Hashable) -> tuple[Frame, ...]:
        """The stack at the line of the same functions at which the thread was at least twice as often as where it is.

        The present stack if there is none, if it waits for other ranks, or if there was progress since the last sample.
        """
        now, counts = _path(stack), self._counts
        if position != self._position or is_in_wait(stack):
            return stack
        alike = [path for path in list(counts) if _functions(path) == _functions(now)]
        most = max(alike, key=lambda path: counts[path], default=now)
        # The present stack is a sample, too.
        return self._latest[most] if counts[most] >= 2 * (counts[now] + 1) else stack


def _path(stack: tuple[Frame, ...]) -> _Path:
    return tuple((frame.file, frame.function, frame.line) for frame in stack if frame.user)


def _functions(path: _Path) -> tuple[tuple[str, str], ...]:
    return tuple((file, function) for file, function, _ in path)
