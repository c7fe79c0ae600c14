"""The loops of a function, as its source has them."""

import ast
from collections.abc import Collection, Iterator
from typing import NamedTuple

from lightning_ncclsafe.probes.source.scopes import scope_at
from lightning_ncclsafe.probes.source.syntax import COMPREHENSIONS, last_line

_STATEMENTS = (ast.For, ast.AsyncFor, ast.While)


class Loop(NamedTuple):
    """A loop in the source of a function.

    Attributes:
        first: Its first line.
        last: The last line of its body.
        is_conditional: Whether it is a ``while`` with a condition: the head of ``while True:`` does not say when it
            ends, and a ``for`` or a comprehension ends with what it goes through.
    """

    first: int
    last: int
    is_conditional: bool


def loops_around(file: str, function: str, lines: Collection[int]) -> list[Loop]:
    """The loops of a function that have all these lines, from inside out. Reads the source file.

    Args:
        file: Path of the source file.
        function: Name of the function, as of its frame.
        lines: Some of its lines, at least one.
    """
    loops = _loops(file, function, min(lines))
    around = (loop for loop in loops if loop.first <= min(lines) and max(lines) <= loop.last)
    return sorted(around, key=lambda loop: (-loop.first, loop.last))


def _loops(file: str, function: str, line: int) -> Iterator[Loop]:
    for node in scope_at(file, function, line).nodes:
        if isinstance(node, _STATEMENTS):
            is_conditional = isinstance(node, ast.While) and not isinstance(node.test, ast.Constant)
            yield Loop(node.lineno, last_line(node.body[-1]), is_conditional)
        elif isinstance(node, COMPREHENSIONS):
            yield Loop(node.lineno, last_line(node), is_conditional=False)
