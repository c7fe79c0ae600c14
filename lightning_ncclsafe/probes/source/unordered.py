"""Calls in a loop that each process goes through in an order of its own: over a set of text, or a folder's entries."""

import ast
import os
from collections.abc import Collection, Iterable, Iterator

from lightning_ncclsafe.probes.source.assignments import Given, variable
from lightning_ncclsafe.probes.source.scopes import Scope, first_places, scopes_of
from lightning_ncclsafe.probes.source.syntax import COMPREHENSIONS, name_of, nodes_in, source_text

_SETS = ("set", "frozenset")
_OF_SETS = ("union", "intersection", "difference", "symmetric_difference")
# These keep the order of what they are given, as sorted() does not.
_KEEPING = ("list", "tuple", "iter", "enumerate", "reversed", "fromkeys")
_ENTRIES = ("listdir", "scandir", "iterdir", "glob", "iglob", "rglob")
_MOST_NAMES = 8


def calls_in_own_order(names: Collection[str], files: Iterable[str]) -> tuple[str, ...]:
    """``"file:line in function"`` of the calls of these functions in such a loop, the first few.

    With PYTHONHASHSEED, the order of a set is the same in all processes, as far as its numbers or texts are.
    """
    with_any = (file for file in files if any(name in source_text(file) for name in names))
    scopes = (scope for file in with_any for scope in scopes_of(file))
    calls = ((scope, call) for scope in scopes for call in scope.calls(names))
    return first_places(scope.place(call.lineno) for scope, call in calls if _is_in_own_order(call, scope))


def _is_in_own_order(call: ast.Call, scope: Scope) -> bool:
    return any(_has_own_order(one, scope, call.lineno) for one in _looped_over(call, scope))


def _looped_over(call: ast.Call, scope: Scope) -> Iterator[ast.expr]:
    """What the loops and comprehensions around a call go through."""
    for one in scope.each(ast.For):
        if any(node is call for node in nodes_in(one.body)):
            yield one.iter
    for node in scope.nodes:
        if isinstance(node, COMPREHENSIONS) and any(inner is call for inner in ast.walk(node)):
            yield from (generator.iter for generator in node.generators)


def _has_own_order(value: ast.expr | None, scope: Scope, line: int) -> bool:
    """Whether an expression is a set or the entries of a folder, or keeps the order of one."""
    for _ in range(_MOST_NAMES):
        if isinstance(value, ast.Name):
            made = variable(value.id, Given(None, scope, line))
            value, scope, line = (made.value, made.scope, made.line) if made is not None else (None, scope, line)
        elif isinstance(value, ast.Call) and name_of(value.func) in _KEEPING and value.args:
            value = value.args[0]
        elif isinstance(value, ast.Call) and name_of(value.func) in _OF_SETS and isinstance(value.func, ast.Attribute):
            value = value.func.value
        elif isinstance(value, ast.BinOp):
            value = value.left
        else:
            break
    if isinstance(value, ast.Call) and name_of(value.func) in _ENTRIES:
        return True
    is_set = isinstance(value, (ast.Set, ast.SetComp)) or (isinstance(value, ast.Call) and name_of(value.func) in _SETS)
    return is_set and not os.environ.get("PYTHONHASHSEED", "").isdecimal()
