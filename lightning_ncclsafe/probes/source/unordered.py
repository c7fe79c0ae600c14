"""Calls in a loop over a set, which each process goes through in an order of its own if it is a set of text."""

import ast
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.probes.source.assignments import Given, variable
from lightning_ncclsafe.probes.source.own_values import hashes_text_alike
from lightning_ncclsafe.probes.source.scopes import Scope, scopes_of
from lightning_ncclsafe.probes.source.syntax import COMPREHENSIONS, calls_within, is_any_constant, name_of, source_text

_SETS = ("set", "frozenset")
_OF_SETS = ("union", "intersection", "difference", "symmetric_difference")
# These keep the order of what they are given, as sorted() does not.
_KEEPING = ("list", "tuple", "iter", "enumerate", "reversed", "fromkeys")
_READING = ("sorted", "len", "print", "dict", "min", "max", *_SETS, *_KEEPING)
_MOST_NAMES, _MOST_FILES = 8, 16


def made_in_order_of_set(name: str, files: Iterable[str]) -> str:
    """``"file:line in function"`` of the only call of a function in these files, if each pass of such a loop makes it.

    Numbers are hashed alike in all processes, so what shows to be a set of numbers has one order; and with
    PYTHONHASHSEED, any set has.
    """
    with_any = [file for file in files if f"{name}(" in source_text(file)]
    scopes = (scope for file in with_any for scope in scopes_of(file)) if len(with_any) <= _MOST_FILES else iter(())
    calls = [(scope, call) for scope in scopes for call in scope.calls([name])]
    if len(calls) != 1 or hashes_text_alike():
        return ""
    ((scope, call),) = calls
    return (
        scope.place(call.lineno) if any(_is_set(one, scope, call.lineno) for one in _looped_over(call, scope)) else ""
    )


def _looped_over(call: ast.Call, scope: Scope) -> Iterator[ast.expr]:
    """What the loops and comprehensions around a call go through, where each pass makes the call."""
    for one in scope.each(ast.For):
        # Not under a condition: it may be made in one pass only.
        plain = (part for part in one.body if isinstance(part, (ast.Assign, ast.AnnAssign, ast.Expr)))
        if any(inner is call for part in plain for inner in calls_within(part)):
            yield one.iter
    for node in scope.nodes:
        if isinstance(node, COMPREHENSIONS) and any(inner is call for inner in calls_within(node)):
            yield from (generator.iter for generator in node.generators)


def _is_set(value: ast.expr, scope: Scope, line: int) -> bool:
    """Whether an expression is a set, or keeps the order of one; not of what shows to be a set of numbers."""
    made: Given | None = Given(value, scope, line)
    for _ in range(_MOST_NAMES):
        inner = _kept(made.value) if made is not None else None
        if made is None or inner is None:
            break
        made = _value_of(inner, made) if isinstance(inner, ast.Name) else made._replace(value=inner)
    held = made.value if made is not None else None
    if isinstance(held, ast.Call) and name_of(held.func) in _SETS and len(held.args) == 1:
        return not _is_of_numbers(held.args[0])
    if isinstance(held, ast.Set):
        return len(held.elts) > 1 and not all(map(_is_number, held.elts))
    return isinstance(held, ast.SetComp) and not _is_number(held.elt) and not _is_of_numbers(held.generators[0].iter)


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
    """What a variable has been given, if nothing may have given it another order since: ``names.sort()``."""
    made = variable(name.id, at)
    if made is None or made.is_part or made.is_conditional:
        return None
    calls = [call for call in made.scope.each(ast.Call) if made.line < call.lineno < at.line]
    given = (node for call in calls if name_of(call.func) not in _READING for node in call.args)
    owners = (call.func.value for call in calls if isinstance(call.func, ast.Attribute))
    is_changed = any(isinstance(node, ast.Name) and node.id == name.id for node in (*given, *owners))
    return None if is_changed else made


def _is_of_numbers(value: ast.expr) -> bool:
    if isinstance(value, (ast.List, ast.Tuple)):
        return all(map(_is_number, value.elts))
    return isinstance(value, ast.Call) and name_of(value.func) in ("range", "get_process_group_ranks")


def _is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.BinOp) or (is_any_constant(value) and not isinstance(getattr(value, "value", ""), str))
