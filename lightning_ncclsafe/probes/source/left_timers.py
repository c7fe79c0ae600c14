"""The line at which a function is left although a timer still runs that it cancels on its other ways out."""

import ast
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from lightning_ncclsafe.probes.source.syntax import FUNCTIONS, TRY_STATEMENTS, Function, name_of, nodes_in

_Test = Callable[[ast.Call], bool]


class WayOut(NamedTuple):
    """A ``return`` or ``raise`` that leaves a timer set.

    Attributes:
        file: Number of the file, 0 for the one that sets the timer.
        line: Its line.
        function: The name of the function.
    """

    file: int
    line: int
    function: str


class _Helpers(NamedTuple):
    """The functions of a file that set the timer, and those that cancel it, by name.

    Attributes:
        known_by: The names of which another file has one if it calls these: of their class, or their own.
    """

    setting: frozenset[str] = frozenset()
    cancelling: frozenset[str] = frozenset()
    known_by: frozenset[str] = frozenset()


def ways_out(tree: ast.Module, others: Collection[ast.Module], sets: _Test, cancels: _Test) -> list[WayOut]:
    """Where functions return or raise between a call that sets a timer and one that cancels it.

    What a ``finally`` cancels is not left set.

    Args:
        tree: The file that sets it.
        others: Files that may call its functions.
        sets: Whether a call sets a timer.
        cancels: Whether a call cancels one.
    """
    helpers = _helpers(tree, sets, cancels)
    found = list[WayOut]()
    for number, file in enumerate((tree, *others)):
        if number and not helpers.known_by & _names_in(file):
            continue
        functions = (node for node in ast.walk(file) if isinstance(node, FUNCTIONS))
        tests = (_never, _never) if number else (sets, cancels)
        found += [WayOut(number, line, one.name) for one in functions for line in _left_in(one, helpers, *tests)]
    return found


def _never(call: ast.Call) -> bool:
    return False


def _names_in(tree: ast.Module) -> set[str]:
    imported = {
        one.asname or one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names
    }
    return imported | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _helpers(tree: ast.Module, sets: _Test, cancels: _Test) -> _Helpers:
    """Those functions that do only one of both."""
    setting, cancelling, known_by = set[str](), set[str](), set[str]()
    classes = {one: node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for one in node.body}
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTIONS):
            continue
        calls = [one for one in nodes_in(node.body) if isinstance(one, ast.Call)]
        does_set, does_cancel = any(map(sets, calls)), any(map(cancels, calls))
        if does_set is not does_cancel:
            (setting if does_set else cancelling).add(node.name)
            known_by.add(classes.get(node, node.name))
    return _Helpers(frozenset(setting), frozenset(cancelling), frozenset(known_by))


def _left_in(function: Function, helpers: _Helpers, sets: _Test, cancels: _Test) -> Iterator[int]:
    """The lines of a function at which it is left while the timer runs."""
    calls = [one for one in nodes_in(function.body) if isinstance(one, ast.Call)]
    setting = [one for one in calls if sets(one) or name_of(one.func) in helpers.setting]
    if len(setting) != 1:
        return
    of = _object(setting[0])
    cancelling = {
        one for one in calls if cancels(one) or (name_of(one.func) in helpers.cancelling and _object(one) == of)
    }
    last = max((one.lineno for one in cancelling), default=0)
    jumps = (one for one in nodes_in(function.body) if isinstance(one, (ast.Return, ast.Raise)))
    for jump in jumps:
        is_between = setting[0].lineno < jump.lineno < last
        if is_between and not _is_cancelled(jump, function, cancelling, setting[0].lineno):
            yield jump.lineno


def _object(call: ast.Call) -> str:
    """What a method is called of; empty for a function."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _is_cancelled(jump: ast.stmt, function: Function, cancelling: Collection[ast.Call], since: int) -> bool:
    """Whether a ``finally`` around a jump cancels the timer, or a statement before it in a block around it."""
    for node in (function, *nodes_in(function.body)):
        closing = node.finalbody if isinstance(node, TRY_STATEMENTS) else []
        blocks = [getattr(node, name, None) for name in ("body", "handlers", "orelse", "finalbody")]
        for block in (one for one in blocks if isinstance(one, list) and _has(one, {jump})):
            before = [one for one in block if since < one.lineno < jump.lineno and not _has([one], {jump})]
            if _has([*before, *(closing if block is not closing else [])], cancelling):
                return True
    return False


def _has(block: Collection[ast.AST], wanted: Collection[ast.AST]) -> bool:
    return any(node in wanted for one in block for node in ast.walk(one))
