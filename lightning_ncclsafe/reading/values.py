"""Values of unknown types, which count as absent if they are not as expected; and the error of this package.

Equal ranks, shapes and stacks are the same object: there are many in large jobs.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.recorder.model import whole as whole

MOST_RANKS = 262_144
"""Higher ranks are not believed."""
_LONGEST_RANKS = 2_000_000
_LONGEST_TEXT = 400
_MOST_SHAPES = 4096
_MOST_LENGTHS = 64
_MOST_FRAMES = 60
_MOST_FRAMES_GIVEN = 1000
_NOT_USERS = re.compile(
    r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python3|[/\\]bin[/\\][\w.-]+$|^<(?!ipython-input)|^\?\?"
)
# C++ frames, with TORCH_FR_CPP_STACK.
_SOURCES = (".py", ">")


def text(value: object) -> str:
    """A text, cut to 400 characters."""
    return value[:_LONGEST_TEXT] if isinstance(value, str) else ""


def items(value: object) -> list[Any] | tuple[Any, ...]:
    """A list or tuple."""
    return value if isinstance(value, (list, tuple)) else ()


def mapping(value: object) -> dict[Any, Any]:
    """A dictionary."""
    return value if isinstance(value, dict) else {}


def shapes(value: object) -> tuple[tuple[int, ...], ...]:
    """Shapes of tensors, which must be whole numbers and no less than 0."""
    try:
        return _shapes(tuple(map(tuple, items(value)[:_MOST_SHAPES])))
    except TypeError:  # values of another type
        return ()


@lru_cache(maxsize=4096)
def _shapes(value: tuple[tuple[object, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Checks and keeps equal shapes once, as ranks and steps call alike."""
    return tuple(tuple(max(whole(length), 0) for length in shape[:_MOST_LENGTHS]) for shape in value)


def texts(value: object) -> tuple[str, ...]:
    """Texts, each cut to 400 characters; other values become empty."""
    try:
        return _texts(tuple(items(value)[:_MOST_SHAPES]))
    except TypeError:
        return ()


@lru_cache(maxsize=4096)
def _texts(value: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(map(text, value))


def ranks(value: object) -> tuple[int, ...]:
    """Ranks in ascending order, from a list, or from text as the recorder writes it, ``"[0, 1, 2]"``."""
    if isinstance(value, str):
        return _ranks_in_text(value) if len(value) < _LONGEST_RANKS else ()
    return _in_order(items(value))


@lru_cache(maxsize=1024)
def _ranks_in_text(value: str) -> tuple[int, ...]:
    """Reads and keeps equal texts once: all ranks of a group write the same, and it is long in large jobs."""
    return _in_order([number.strip() for number in value.strip("[] ").split(",")])


def _in_order(numbers: Sequence[object]) -> tuple[int, ...]:
    found = {whole(number, -1) for number in numbers[:MOST_RANKS]}
    return tuple(sorted(rank for rank in found if 0 <= rank < MOST_RANKS))


@lru_cache(maxsize=65_536)
def frame(file: str, line: int, function: str) -> Frame:
    """A frame; equal ones are the same object."""
    return Frame(file=file, line=line, function=function, user=_NOT_USERS.search(file) is None)


@lru_cache(maxsize=16_384)
def _one_stack(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return stack


class DumpStacks:
    """The stacks of one dump, which must outlive this. Entries share frames, so each stack is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[Frame, ...]] = {}

    def read(self, value: object) -> tuple[Frame, ...]:
        """The stack of an entry, outermost frame first; dumps have the innermost first."""
        given = items(value)[:_MOST_FRAMES_GIVEN]
        same = tuple(map(id, given))
        if same not in self._known:
            self._known[same] = _stack_of(given)
        return self._known[same]


def _stack_of(given: Sequence[object]) -> tuple[Frame, ...]:
    found = []
    for item in given:
        fields = mapping(item)
        file = text(fields.get("filename"))
        if file.endswith(_SOURCES):
            found.append(frame(file, whole(fields.get("line")), text(fields.get("name"))))
    return stack(found[:_MOST_FRAMES][::-1])


def stack(frames: list[Frame]) -> tuple[Frame, ...]:
    """Frames, outermost first, as a stack; equal ones are the same object."""
    return _one_stack(tuple(frames[-_MOST_FRAMES:]))


class ReadingError(ValueError):
    """A file is not of the expected kind, damaged or too large; the message says which."""
