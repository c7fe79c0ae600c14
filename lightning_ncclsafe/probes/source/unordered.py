"""A call in a loop over a set of text, which each process may go through in an order of its own."""

import ast
import re
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.probes.source.assignments import Given, variable
from lightning_ncclsafe.probes.source.own_values import hashes_text_alike
from lightning_ncclsafe.probes.source.scopes import Scope, scopes_of
from lightning_ncclsafe.probes.source.syntax import COMPREHENSIONS, calls_within, name_of, nodes_in, source_text

_SETS = ("set", "frozenset")
_OF_SETS = ("union", "intersection", "difference", "symmetric_difference")
# These keep the order of what they are given, as sorted() does not.
_KEEPING = ("list", "tuple", "iter", "enumerate", "reversed", "fromkeys")
_READING = ("sorted", "len", "print", "dict", "min", "max", *_SETS, *_KEEPING)
# Numbers are hashed alike in all processes, and what a set holds does not show: what each item is called does.
_OF_TEXT = re.compile(r"(?:name|key|label|tag|modality|domain|language|lang|task|kind|field|column|dataset)s?$")
_MOST_NAMES, _MOST_FILES = 8, 16


def made_in_order_of_set(name: str, files: Iterable[str]) -> str:
    """``"file:line in function"`` of the only call of a function in these files, if each pass of such a loop makes it.

    Empty with PYTHONHASHSEED and in forked processes, where all have one order.
    """
    with_any = [file for file in files if f"{name}(" in source_text(file)]
    scopes = (scope for file in with_any for scope in scopes_of(file)) if len(with_any) <= _MOST_FILES else iter(())
    calls = [(scope, call) for scope in scopes for call in scope.calls([name])]
    if len(calls) != 1 or hashes_text_alike():
        return ""
    ((scope, call),) = calls
    loops = _loops_around(call, scope)
    return scope.place(call.lineno) if any(_is_of_text(loop, scope, call.lineno) for loop in loops) else ""


def _loops_around(call: ast.Call, scope: Scope) -> Iterator[ast.For | ast.comprehension]:
    """The loops around a call each pass of which makes it."""
    for one in scope.each(ast.For):
        # Under a condition, it may be made in one pass only.
        plain = (part for part in one.body if isinstance(part, (ast.Assign, ast.AnnAssign, ast.Expr)))
        is_left = any(isinstance(node, (ast.Continue, ast.Break)) for node in nodes_in(one.body))
        if not is_left and any(inner is call for part in plain for inner in calls_within(part)):
            yield one
    for node in scope.nodes:
        if isinstance(node, COMPREHENSIONS) and any(inner is call for inner in calls_within(node)):
            yield from node.generators


def _is_of_text(loop: ast.For | ast.comprehension, scope: Scope, line: int) -> bool:
    """Whether a loop goes through a set, or what keeps the order of one, whose items seem to be text."""
    made: Given | None = Given(loop.iter, scope, line)
    for _ in range(_MOST_NAMES):
        inner = _kept(made.value) if made is not None else None
        if made is None or inner is None:
            break
        made = _value_of(inner, made) if isinstance(inner, ast.Name) else made._replace(value=inner)
    held = made.value if made is not None else None
    if isinstance(held, ast.Set):
        return len(held.elts) > 1 and all(isinstance(getattr(one, "value", None), str) for one in held.elts)
    is_set = isinstance(held, ast.SetComp) or (isinstance(held, ast.Call) and name_of(held.func) in _SETS)
    items = (node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name))
    return is_set and any(map(_OF_TEXT.search, items))


def _kept(value: ast.expr | None) -> ast.expr | None:
    """What an expression has the order of, if that is a variable or a part of it; else None."""
    if isinstance(value, ast.Name):
        return value
    if isinstance(value, ast.Call) and name_of(value.func) in _KEEPING and value.args:
        return value.args[0]
    if isinstance(value, ast.Call) and name_of(value.func) in _OF_SETS and isinstance(value.func, ast.Attribute):
        return value.func.value
    return value.left if isinstance(value, ast.BinOp) else None


def _value_of(name: ast.Name, at: Given) -> Given | None:
    """What a variable is given, if nothing may have given it another order since: ``names.sort()``."""
    made = variable(name.id, at)
    if made is None or made.is_part or made.is_conditional:
        return None
    is_outer = made.scope != at.scope
    calls = [call for call in made.scope.each(ast.Call) if is_outer or made.line < call.lineno < at.line]
    given = [node for call in calls if name_of(call.func) not in _READING for node in call.args]
    given += [call.func.value for call in calls if isinstance(call.func, ast.Attribute)]
    given += [node.value for node in made.scope.each(ast.Subscript) if isinstance(node.ctx, ast.Store)]
    return None if any(isinstance(node, ast.Name) and node.id == name.id for node in given) else made
