"""The sends and receives that the main thread waits for, by the variable whose ``wait`` it has called."""

import ast
import linecache
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lightning_ncclsafe._torch import works
from lightning_ncclsafe.probes.process.stacks import main_thread_frames
from lightning_ncclsafe.probes.source.assignments import Given, variable
from lightning_ncclsafe.probes.source.scopes import Scope, scope_of

_WAITS = re.compile(r"\b(\w+)(?:\[[^\]]*\])?\.wait\(")
# Of a list whose items are waited for one after the other.
_MOST = 64


def awaited() -> tuple[tuple[str, ...], str]:
    """``("send", "recv")`` and ``"file:line in exchange"``, where they were begun; empty if it waits for none of them.

    Both kinds are told of a list that has both; the line is empty if the source does not show it.
    """
    frame = next(main_thread_frames(), None)
    named = _WAITS.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)) if frame is not None else None
    if frame is None or named is None:
        return (), ""
    kinds = {works.operation(work) for work in _items(frame.f_locals.get(named[1]))}
    if not kinds or not kinds <= {works.SEND, works.RECEIVE}:
        return (), ""
    return tuple(sorted(kinds, reverse=True)), _begun_at(named[1], frame)


def _items(value: Any) -> Iterator[Any]:
    yield from value[:_MOST] if isinstance(value, (list, tuple)) else (value,)


def _begun_at(name: str, frame: FrameType) -> str:
    scope = scope_of(frame.f_code)
    line = _line_of(name, scope, frame.f_lineno)
    return scope.place(line) if line and scope.file else ""


def _line_of(name: str, scope: Scope, before: int) -> int:
    """The line that gives a variable its value: through a loop, that of what the loop goes through."""
    for loop in (node for node in scope.nodes if isinstance(node, (ast.For, ast.comprehension))):
        if isinstance(loop.target, ast.Name) and loop.target.id == name:
            return _line_of(loop.iter.id, scope, before) if isinstance(loop.iter, ast.Name) else loop.iter.lineno
    made = variable(name, Given(None, scope, before))
    return made.line if made is not None and made.scope == scope and made.value is not None else 0
