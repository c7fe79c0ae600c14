"""What the frames of a stack show: the user's own lines, the Trainer's start, and how far two stacks have come."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.libraries import Code
from lightning_ncclsafe.facts import Branch, Decides, Frame

_COMPILES = libraries.COMPILATION | libraries.TUNING
# Reading a device's result in Python waits for everything queued on the device, including collectives.
_SYNC = re.compile(r"\.(?:item|cpu|tolist|numpy)\(|synchronize\(|\.to\(|\bfloat\(|\bint\(|\bbool\(")


def is_in(code: Code, stack: Iterable[Frame]) -> bool:
    """Whether any of these frames is in this code."""
    return code.has_any(stack)


def deepest_user_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((frame for frame in reversed(stack) if frame.user), None)


def user_frames(stack: Iterable[Frame]) -> tuple[Frame, ...]:
    """The frames of the user's own code, outermost first."""
    return tuple(frame for frame in stack if frame.user)


def first_user_frame(stacks: Iterable[tuple[Frame, ...]]) -> Frame | None:
    """The innermost frame of the user's own code on the first of these stacks that has one."""
    return next((frame for stack in stacks if (frame := deepest_user_frame(stack)) is not None), None)


def below_user(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames below the user's innermost line."""
    return stack[last_user(stack) + 1 :]


def last_user(stack: tuple[Frame, ...]) -> int:
    """Index of the innermost frame of the user's own code; -1 if there is none."""
    return max((depth for depth, frame in enumerate(stack) if frame.user), default=-1)


def starts_trainer(frame: Frame) -> bool:
    """Whether this frame is where a Trainer starts to run."""
    return libraries.TRAINER_RUN.has(frame.file, frame.function)


def trainer_start(stack: tuple[Frame, ...]) -> int:
    """Index of the frame in which the Trainer starts to run; 0 if there is none.

    The frames outside of it (a sweep agent, ``if rank != -1: main()``) show nothing about what the rank is doing.
    """
    return next((index for index, frame in enumerate(stack) if starts_trainer(frame)), 0)


def inside_trainer(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames from the one in which the Trainer starts to run; all of them if there is none."""
    return stack[trainer_start(stack) :]


def outside_trainer(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames around the one in which the Trainer starts to run; all of them if there is none."""
    return stack[: trainer_start(stack) or None]


def is_compiling(stack: Iterable[Frame]) -> bool:
    """Whether ``torch.compile`` or Triton compiles, or tunes what it has compiled."""
    return is_in(_COMPILES, stack)


def outside_compiler(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames down to a compiler's: what it calls, such as a back end of the user's, is not why it compiles."""
    return tuple(takewhile(lambda frame: not is_compiling((frame,)), stack))


def looks_like_device_sync(frame: Frame) -> bool:
    """Whether the line reads a value back from a device, or synchronises with one."""
    return _SYNC.search(frame.code) is not None


def depth_passed(own: tuple[Frame, ...], other: tuple[Frame, ...]) -> int | None:
    """Depth of the user's function in which one stack is further down than another, reached by the same calls; or None.

    The first rank is past the line that the other one is at.
    """
    for depth, (one, two) in enumerate(zip(own, other, strict=False)):
        if (one.file, one.function) != (two.file, two.function):
            return None
        if one.line != two.line:
            return depth if one.user and one.line > two.line else None
    return None


def is_before(other: tuple[Frame, ...], own: tuple[Frame, ...]) -> bool:
    """Whether one stack has yet to reach the line at which another is in the same function, and no loop leads back."""
    depth = depth_passed(own, other)
    return depth is not None and not any(
        loop.line <= other[depth].line <= loop.until for loop in _loops_around(own[depth])
    )


def is_before_line(frame: Frame, place: str) -> bool:
    """Whether a frame is before the line ``"path:line in function"`` of its function, and no loop leads back to it."""
    there, _, function = place.rpartition(" in ")
    file, _, line = there.rpartition(":")
    if (frame.file, frame.function) != (file, function) or not line.isdecimal() or frame.line >= int(line):
        return False
    return not any(loop.line <= int(line) <= loop.until for loop in _loops_around(frame))


def has_passed(own: tuple[Frame, ...], other: tuple[Frame, ...]) -> bool:
    """Whether a rank is past the line of another one in the same function, and no loop around them leads back to it."""
    depth = depth_passed(own, other)
    return depth is not None and is_before(other, own) and not any(map(_loops_around, own[:depth]))


def loop_left(own: tuple[Frame, ...], other: tuple[Frame, ...]) -> Frame | None:
    """The outermost loop, at its first line, that one stack is past and another is in; None if there is none."""
    depth = depth_passed(own, other)
    if depth is None:
        return None
    common = _loops_around(own[depth])
    for frame in other[depth:]:
        if frame.user and (loops := [loop for loop in _loops_around(frame) if loop not in common]):
            code = loops[-1].test.rpartition("  (line ")[0]
            return replace(frame, line=loops[-1].line, code=code)
    return None


def is_in_loop_below(own: tuple[Frame, ...], other: tuple[Frame, ...]) -> bool:
    """Whether another stack is in a loop of a function that it has called at the very line that one stack is at.

    A stack without any line is above all others.
    """
    is_below = [(one.file, one.line) for one in own] == [(two.file, two.line) for two in other[: len(own)]]
    return is_below and any(frame.user and _loops_around(frame) for frame in other[len(own) :])


def _loops_around(frame: Frame) -> list[Branch]:
    """The loops around a frame's line whose number of passes may differ between ranks, from outside in."""
    return [branch for branch in frame.branches if branch.on is Decides.PASSES and not branch.jump]
