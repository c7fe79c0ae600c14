"""Values of unknown types, which count as absent if they are not as expected; and the error of this package."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lightning_ncclsafe.recorder.model import whole

__all__ = ["MOST_RANKS", "items", "mapping", "ranks", "shapes", "text", "texts", "whole"]

MOST_RANKS = 262_144
"""Higher ranks are not believed."""
_LONGEST_RANKS = 2_000_000
_LONGEST_TEXT = 400
_MOST_SHAPES = 4096
_MOST_LENGTHS = 64


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


class ReadingError(ValueError):
    """A file is not of the expected kind, damaged or too large; the message says which."""
