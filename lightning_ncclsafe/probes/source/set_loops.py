"""Loops over sets: the order may differ between processes, as Python hashes text with another seed in each of them.

See PYTHONHASHSEED in Python's documentation. Sets of numbers that are written out have one order everywhere.
"""

import ast
from collections.abc import Iterator

from lightning_ncclsafe.probes.source.syntax import (
    COMPREHENSIONS,
    FUNCTIONS,
    Function,
    is_of_self,
    last_line,
    name_of,
    nodes_in,
    statements_in,
)

_MOST_NAMES = 4
_SETS = ("set", "frozenset")
_OF_SETS = ("union", "intersection", "difference", "symmetric_difference", "copy")
_OPERATORS = (ast.BitOr, ast.BitAnd, ast.BitXor, ast.Sub)
# They go through their arguments in the order of these.
_KEEP_ORDER = ("list", "tuple", "iter", "enumerate", "zip", "reversed", "map", "filter", "fromkeys")
_CHARACTERS = 120
_Loop = ast.For | ast.AsyncFor | ast.comprehension


def loop_over_set(tree: ast.Module, line: int) -> str:
    """The innermost loop of the same function around a line that goes over a set: ``"for key in keys  (line 40)"``.

    Empty if there is none, as far as the file shows.
    """
    functions = (one for one in statements_in(tree.body) if isinstance(one, FUNCTIONS))
    around = (one for one in functions if one.lineno <= line <= last_line(one))
    function = max(around, key=lambda one: one.lineno, default=None)
    loops = _loops_around(line, tree.body if function is None else function.body)
    for number, loop in sorted(loops, key=lambda one: -one[0]):
        if _is_set(loop.iter, function, tree, _MOST_NAMES):
            code = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
            return f"{code[:_CHARACTERS]}  (line {number})"
    return ""


def _loops_around(line: int, block: list[ast.stmt]) -> Iterator[tuple[int, _Loop]]:
    for node in nodes_in(block):
        if isinstance(node, (ast.For, ast.AsyncFor)) and node.body[0].lineno <= line <= last_line(node.body[-1]):
            yield node.lineno, node
        elif isinstance(node, COMPREHENSIONS) and node.lineno <= line <= last_line(node):
            yield from ((node.lineno, one) for one in node.generators)


def _is_set(value: ast.expr, function: Function | None, tree: ast.Module, names: int) -> bool:
    """Whether an expression is a set, or goes through one in its order."""
    if isinstance(value, ast.Set):
        return not all(isinstance(one, ast.Constant) and isinstance(one.value, (int, float)) for one in value.elts)
    if isinstance(value, ast.SetComp):
        return True
    if isinstance(value, ast.BinOp) and isinstance(value.op, _OPERATORS):
        return any(_is_set(side, function, tree, names) for side in (value.left, value.right))
    if isinstance(value, ast.Call):
        return _is_set_made(value, function, tree, names)
    if not names:
        return False
    if isinstance(value, ast.Name):
        given = _given_to(value.id, function, tree)
    else:
        given = _given_to_attribute(value.attr, tree) if is_of_self(value) else []
    return bool(given) and all(one is not None and _is_set(one, where, tree, names - 1) for one, where in given)


def _is_set_made(call: ast.Call, function: Function | None, tree: ast.Module, names: int) -> bool:
    name = name_of(call.func)
    if isinstance(call.func, ast.Name) and name in _SETS:
        return not any(isinstance(one, ast.Call) and name_of(one.func) == "range" for one in call.args)
    if isinstance(call.func, ast.Attribute) and name in _OF_SETS:
        return _is_set(call.func.value, function, tree, names)
    return name in _KEEP_ORDER and any(_is_set(one, function, tree, names) for one in call.args)


_Given = list[tuple[ast.expr | None, Function | None]]


def _given_to(name: str, function: Function | None, tree: ast.Module) -> _Given:
    """All values that a variable is given: in the function, or else in the file; None for what is not shown."""
    for where, block in ((function, function.body if function is not None else []), (None, tree.body)):
        arguments = [] if where is None else [one for one in ast.walk(where.args) if isinstance(one, ast.arg)]
        given: _Given = [(None, where) for one in arguments if one.arg == name]
        shown = {id(target): value for target, value in _assigned(block)}
        stored = (one for one in nodes_in(block) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        given += [(shown.get(id(one)), where) for one in stored if one.id == name]
        if given:
            return given
    return []


def _given_to_attribute(name: str, tree: ast.Module) -> _Given:
    """All values that an attribute of ``self`` of this name is given in the file, in whichever class."""
    found: _Given = []
    for function in (one for one in statements_in(tree.body) if isinstance(one, FUNCTIONS)):
        shown = {id(target): value for target, value in _assigned(function.body)}
        stored = (one for one in nodes_in(function.body) if isinstance(one, ast.Attribute))
        own = (one for one in stored if isinstance(one.ctx, ast.Store) and is_of_self(one) and one.attr == name)
        found += [(shown.get(id(one)), function) for one in own]
    return found


def _assigned(block: list[ast.stmt]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each name or attribute that is given the whole of a value."""
    for node in nodes_in(block):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value
