"""The sends and receives that the main thread waits for, by the variable whose ``wait`` it has called."""

import ast
import linecache
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.probes.process.stacks import main_thread_frames
from lightning_ncclsafe.probes.source.assignments import Given, variable
from lightning_ncclsafe.probes.source.scopes import Scope, scope_of

# Of a variable: an attribute may have the name of one.
_WAITS = re.compile(r"(?<![\w.])(\w+)(?:\[[^\]]*\])?\.wait\(")
# They hand on what was begun elsewhere.
_ORDERS = ("enumerate", "filter", "iter", "list", "reversed", "sorted", "tuple", "zip")
# Of a list whose items are waited for one after the other.
_MOST = 64


def awaited() -> tuple[tuple[str, ...], str]:
    """``("send", "recv")`` and ``"file:line in exchange"``, where they were begun; empty if it waits for none of them.

    Both kinds are given for a list that has both; the line is empty if the source does not show it.
    """
    frame = next(main_thread_frames(), None)
    if frame is None:
        return (), ""
    names = {*_WAITS.findall(linecache.getline(frame.f_code.co_filename, frame.f_lineno))}
    # Of several in one line, any may be the one.
    name = names.pop() if len(names) == 1 else ""
    kinds = {process_groups.operation(work) for work in _items(frame.f_locals.get(name))}
    if not kinds or not kinds <= {process_groups.SEND, process_groups.RECEIVE}:
        return (), ""
    return tuple(sorted(kinds, reverse=True)), _begun_at(name, frame)


def _items(value: Any) -> Iterator[Any]:
    yield from value[:_MOST] if isinstance(value, (list, tuple)) else (value,)


def _begun_at(name: str, frame: FrameType) -> str:
    scope = scope_of(frame.f_code)
    line = _line_of(name, scope, frame.f_lineno)
    return scope.place(line) if line and scope.file else ""


def _line_of(name: str, scope: Scope, before: int) -> int:
    """The line that gives a variable its value: through a loop, that of what the loop goes through.

    0 if that line only hands on what another one has begun.
    """
    value, before = _looped_over(name, scope, before)
    if value is not None and not isinstance(value, ast.Name):
        return value.lineno if _begins(value) else 0
    made = variable(value.id if value is not None else name, Given(None, scope, before))
    is_shown = made is not None and made.scope == scope and made.value is not None and _begins(made.value)
    return made.line if made is not None and is_shown else 0


def _looped_over(name: str, scope: Scope, line: int) -> tuple[ast.expr | None, int]:
    """What the innermost loop around a line goes through, of those that have this variable, and the loop's line.

    None and the line itself if there is no such loop.
    """
    found: tuple[ast.expr | None, int] = None, line
    for node in scope.nodes:
        if isinstance(node, (ast.For, ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            loops = [node] if isinstance(node, ast.For) else node.generators
            is_around = node.lineno <= line <= (node.end_lineno or node.lineno)
            of_name = [one for one in loops if isinstance(one.target, ast.Name) and one.target.id == name]
            found = (of_name[-1].iter, node.lineno) if is_around and of_name else found
    return found


def _begins(value: ast.expr) -> bool:
    """Whether an expression calls anything but what only goes through other values."""
    calls = (node.func for node in ast.walk(value) if isinstance(node, ast.Call))
    return any(not (isinstance(func, ast.Name) and func.id in _ORDERS) for func in calls)
