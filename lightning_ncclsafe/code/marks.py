"""Marks of functions: probes put them on frames, and rules read them.

Functions of this package declare them about themselves, so no rule has to know one by its file and name, which change;
the methods of the user's own loggers get theirs when a Trainer starts.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import TypeVar

T = TypeVar("T", bound=Callable[..., object])


class Mark(str, Enum):
    """What a frame of this package is, or one of the user's own loggers; other code has no marks."""

    OWN = "own"
    """Code of this package that waits for no rank."""
    STORE = "store"
    """Waits for other ranks, over the exchange or in the job's store."""
    VOTE = "vote"
    """Waits for the other ranks' votes on the next batch, in a collective."""
    LOGGER = "logger"
    """Handles a logger's call, and may wait for room or for storage."""
    ANSWER = "answer"
    """Writes this process's stack for a peer, which asks for its callers."""
    LISTENER = "listener"
    """Listens to Lightning's actions: deeper frames are the guard's own."""
    USER_LOGGER = "user_logger"
    """A method of a logger that the program itself defines; all others are functions of this package."""


def _as_written(file: str) -> str:
    """A path as faulthandler writes it."""
    return file.encode("ascii", "backslashreplace").decode()


_PACKAGE = Path(__file__).parents[1]
_FOLDER = _as_written(f"{_PACKAGE}{os.sep}")
# By file and name, then by lines: a file may have several functions of the same name.
_marked: dict[tuple[str, str], dict[range, Mark]] = defaultdict(dict)


def marked(mark: Mark) -> Callable[[T], T]:
    """Marks a function, or all methods of a class, without changing them: calls cost nothing more.

    Args:
        mark: The mark. A function that waits for ranks should do nothing else: all it calls counts as the wait.
    """

    def register(owner: T) -> T:
        for code in _codes_of(owner):
            lines = range(code.co_firstlineno, max(line or 0 for *_, line in code.co_lines()) + 1)
            # The mark of a method takes precedence over that of its class.
            _marked[_as_written(code.co_filename), code.co_name].setdefault(lines, mark)
        return owner

    return register


def mark_at(file: str, line: int, function: str) -> str:
    """The mark of the frame at this line, with Python's or faulthandler's names; empty for other code."""
    written = _as_written(file)
    found = (mark.value for lines, mark in _marked.get((written, function), {}).items() if line in lines)
    return next(found, Mark.OWN.value if written.startswith(_FOLDER) else "")


def lacks_mark(file: str, mark: str) -> bool:
    """Whether a frame is of this package, wherever it was installed, and was recorded without marks."""
    return not mark and f"/{_PACKAGE.name}/" in file.replace("\\", "/")


def _codes_of(owner: object) -> Iterator[CodeType]:
    for member in vars(owner).values() if isinstance(owner, type) else (owner,):
        function = getattr(member, "__func__", getattr(member, "fget", member))
        code = getattr(unwrap(function), "__code__", None) if callable(function) else None
        if code is not None:
            yield from with_inner(code)


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_inner(constant)
