"""Samples of the stack of a training thread that makes no progress: they show which line of a loop takes longest.

If none takes longest, and a loop that ends by a condition has all of these lines, then what does not end is the loop:
the condition shows on what that depends.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process.stacks import main_thread_stack
from lightning_ncclsafe.probes.source.scopes import scope_at
from lightning_ncclsafe.rules.kit.landmarks import is_in_wait

# A loop has a few lines; recursion may have any number of stacks.
_MOST_PATHS = 64
# The latest samples, those of some seconds: what the thread did before it came to the loop does not count.
_LATEST = 40
# The watchdog takes four samples a second, which may be too few when ranks look.
_MORE, _PAUSE_S, _MORE_S = 16, 0.003, 0.1
_FEWEST = 6
# Those of 3 s: a thread that was at one place in all of them, and in all further ones, waits there now.
_STAYS = 12
# A sleep, or a call that takes long, has nearly all samples; of the two lines of a short loop, one has up to 70%.
_DOMINATES = 0.9

_Path = tuple[tuple[str, str, int], ...]
_Samples = tuple[int, tuple[Frame, ...]]
_NONE: _Samples = (0, ())


class _Since(NamedTuple):
    """What was seen since the last progress.

    Attributes:
        position: Of that progress.
        samples: The number of samples and the latest stack of each path.
        latest: The latest stacks, in order.
    """

    position: Hashable
    samples: dict[_Path, _Samples]
    latest: deque[tuple[Frame, ...]]


class _Common(NamedTuple):
    """A loop that several samples are in.

    Attributes:
        depth: How many of the user's frames are outside of its function.
        ends_at: The line of the condition by which it ends.
    """

    depth: int
    ends_at: int


class StackSamples:
    """Stacks since the last progress; one from before says nothing about what the thread does now."""

    def __init__(self) -> None:
        # In one attribute, so that a reader on another thread sees samples of one position.
        self._since = _Since(None, {}, deque(maxlen=_LATEST))

    def note(self, position: Hashable) -> None:
        """Takes a sample, or forgets all if the position, which changes with any progress, is another one."""
        since, samples, latest = self._since
        if position != since:
            self._since = _Since(position, {}, deque(maxlen=_LATEST))
            return
        stack = main_thread_stack()
        path = _path(stack)
        latest.append(stack)
        if path in samples or len(samples) < _MOST_PATHS:
            samples[path] = samples.get(path, _NONE)[0] + 1, stack

    def usual(self, stack: tuple[Frame, ...], position: Hashable) -> tuple[Frame, ...]:
        """The stack at the line of the same functions at which the thread was at least twice as often as where it is.

        The present stack if there is none, if it waits for other ranks, or if there was progress since the last sample.
        """
        now, (since, samples, _) = _path(stack), self._since
        if position != since or is_in_wait(stack):
            return stack
        alike = [sample for path, sample in [*samples.items()] if _functions(path) == _functions(now)]
        count, most = max(alike, key=lambda sample: sample[0], default=(0, stack))
        # The present stack is a sample, too.
        return most if count >= 2 * (samples.get(now, _NONE)[0] + 1) else stack

    def outside_loop(self, stack: tuple[Frame, ...], position: Callable[[], Hashable]) -> tuple[Frame, ...]:
        """The stack down to the condition by which the loop ends in which the thread goes round; else the same stack.

        The samples agree in all lines outside of that loop, have been seen to go back in it, and no line of it, with
        what it calls, has nearly all of them, or all of the last seconds: such a line, as that of a sleep or of a wait
        that does not end, says more than the condition.

        It takes more samples, for up to 0.1 s, and reads source files, so it is not for the training's thread.

        Args:
            stack: The thread's stack, as seen by :meth:`usual`.
            position: Gives the present position.
        """
        since, _, latest = self._since
        if position() != since or is_in_wait(stack) or not is_in_loop(stack):
            return stack
        seen = [*latest]
        ends_s = time.monotonic() + _MORE_S
        stays = _STAYS
        for _ in range(_MORE):
            if time.monotonic() < ends_s:
                time.sleep(_PAUSE_S)
                seen.append(main_thread_stack())
                stays += 1
        paths = [*map(_path, seen)]
        loop = _common_loop([*paths, _path(stack)])
        if loop is None or len(paths) < _FEWEST or position() != since or any(map(is_in_wait, seen)):
            return stack
        goes_back = any(next_[loop.depth][2] < path[loop.depth][2] for path, next_ in pairwise(paths))
        most = Counter(paths).most_common(1)[0][1]
        goes_on = len({*paths[-stays:]}) > 1
        return _down_to(stack, loop) if goes_back and goes_on and most < _DOMINATES * len(paths) else stack


def outside_common_loop(stacks: Sequence[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The first of these stacks, which were taken shortly one after the other, down to the condition that ends a loop.

    The loop is the one in which they are at different lines. If there is none, it is the whole stack.
    """
    if not stacks:
        return ()
    loop = _common_loop([*map(_path, stacks)])
    return _down_to(stacks[0], loop) if loop is not None else stacks[0]


def is_in_loop(stack: tuple[Frame, ...]) -> bool:
    """Whether a line of the user's in a stack is in a loop that ends by a condition. Reads source files."""
    loops = (loop for place in _path(stack) for loop in scope_at(*place).loops_around([place[2]]))
    return any(loop.ends_at for loop in loops)


def _common_loop(paths: Sequence[_Path]) -> _Common | None:
    """The loop in which all these paths are, at different lines of its function, and at the same outside."""
    # The outermost of the user's frames that is not the same in all.
    depth = next((depth for depth, places in enumerate(zip(*paths, strict=False)) if len({*places}) > 1), None)
    if depth is None or len({path[depth][:2] for path in paths}) > 1:
        return None
    file, function, _ = paths[0][depth]
    lines = {path[depth][2] for path in paths}
    scope = scope_at(file, function, min(lines))
    loop = next(iter(scope.loops_around(lines)), None)
    if loop is None or not loop.ends_at:
        return None
    # What single ranks do in the loop is lost at its condition.
    conditions = {scope_at(*place).rank_condition(place[2]) for path in paths for place in path[depth:]}
    return _Common(depth, loop.ends_at) if conditions <= {"", scope.rank_condition(loop.first)} else None


def _down_to(stack: tuple[Frame, ...], loop: _Common) -> tuple[Frame, ...]:
    index = [index for index, frame in enumerate(stack) if frame.user][loop.depth]
    return (*stack[:index], replace(stack[index], line=loop.ends_at, code=""))


def _path(stack: tuple[Frame, ...]) -> _Path:
    return tuple((frame.file, frame.function, frame.line) for frame in stack if frame.user)


def _functions(path: _Path) -> tuple[tuple[str, str], ...]:
    return tuple((file, function) for file, function, _ in path)
