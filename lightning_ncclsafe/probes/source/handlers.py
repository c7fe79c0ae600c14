"""What ends an exception in a source file: ``except`` clauses, ``suppress``, and its own context managers.

A context manager handles what is raised in the ``with`` block of another function, so the line is in the manager.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from lightning_ncclsafe.probes.source.syntax import (
    FUNCTIONS,
    TRY_STATEMENTS,
    Function,
    is_constant,
    is_of_self,
    name_of,
    nodes_in,
    statements_in,
)

_MANAGERS = ("contextmanager", "asynccontextmanager")
_EXITS = ("__exit__", "__aexit__")
# What asks for the type of the exception that ``__exit__`` is given.
_ASKS_TYPE = ("issubclass", "isinstance")
With: TypeAlias = ast.With | ast.AsyncWith


class Handler(NamedTuple):
    """A line that handles an exception, and the function that it is in."""

    line: int
    function: str


def handled_at(statement: ast.Try) -> int:
    """The clause that handles an exception: the first ``except`` clause that does not end by raising; else 0."""
    kept = (one for one in statement.handlers if not isinstance(one.body[-1], ast.Raise))
    return next((one.lineno for one in kept if not _ends_iteration(one)), 0)


def suppresses(statement: With) -> bool:
    """Whether it is a ``with suppress(…)`` of contextlib."""
    calls = (item.context_expr for item in statement.items)
    return any(isinstance(call, ast.Call) and name_of(call.func) == "suppress" for call in calls)


def name_called(manager: ast.expr) -> str:
    """The name of the function, class or own method that a ``with`` calls; empty for those of other objects."""
    if not isinstance(manager, ast.Call):
        return ""
    return name_of(manager.func) if isinstance(manager.func, ast.Name) or is_of_self(manager.func) else ""


def managers_in(body: list[ast.stmt]) -> dict[str, Handler]:
    """The context managers of a file that handle exceptions at one line, by name; without names that are not unique."""
    found: dict[str, Handler | None] = {}
    for node in statements_in(body):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            lines = [*(_in_class(node) if isinstance(node, ast.ClassDef) else _in_generator(node))]
            found[node.name] = lines[0] if len(lines) == 1 and node.name not in found else None
    return {name: handler for name, handler in found.items() if handler is not None}


def _in_generator(function: Function) -> Iterator[Handler]:
    """What handles an exception that is raised at the ``yield`` of a context manager."""
    decorators = (one.func if isinstance(one, ast.Call) else one for one in function.decorator_list)
    if not any(name_of(one) in _MANAGERS for one in decorators):
        return
    for node in nodes_in(function.body):
        if isinstance(node, TRY_STATEMENTS):
            line = handled_at(node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            line = node.lineno if suppresses(node) else 0
        else:
            continue
        if line and any(isinstance(one, ast.Yield) for one in nodes_in(node.body)):
            yield Handler(line, function.name)


def _in_class(owner: ast.ClassDef) -> Iterator[Handler]:
    """Where the ``__exit__`` of a class returns something true: then what was raised goes no further."""
    for method in owner.body:
        if isinstance(method, FUNCTIONS) and method.name in _EXITS:
            asked = (one for one in nodes_in(method.body) if isinstance(one, ast.If) and _asks_for_none(one.test))
            without_error = {node for one in asked for node in nodes_in(one.body)}
            returns = (one for one in nodes_in(method.body) if isinstance(one, ast.Return) and one not in without_error)
            for node in returns:
                if node.value is not None and _may_be_true(node.value):
                    yield Handler(node.lineno, method.name)


def _may_be_true(value: ast.expr) -> bool:
    """Whether ``__exit__`` returns ``True`` or a comparison; what it calls for its answer may always be false."""
    if isinstance(value, ast.BoolOp):
        return any(map(_may_be_true, value.values))
    if _asks_for_none(value):
        return False
    is_asked = isinstance(value, ast.Call) and name_of(value.func) in _ASKS_TYPE
    return is_constant(value, True) or is_asked or isinstance(value, ast.Compare)


def _asks_for_none(value: ast.expr) -> bool:
    """Whether it is ``… is None``: true in an ``__exit__`` if nothing was raised."""
    if not isinstance(value, ast.Compare) or len(value.ops) > 1:
        return False
    return isinstance(value.ops[0], (ast.Is, ast.Eq)) and is_constant(value.comparators[0], None)


def _ends_iteration(clause: ast.ExceptHandler) -> bool:
    """Whether it catches the end of an iteration, which is not an error."""
    return clause.type is not None and ast.unparse(clause.type) in ("StopIteration", "StopAsyncIteration")
