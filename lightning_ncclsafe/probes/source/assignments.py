"""What gave a variable or an attribute its value: the last assignment in the source before a line.

Nothing is executed, and where several assignments may have been the last, none is known.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from lightning_ncclsafe.probes.source.scopes import Scope, methods_in
from lightning_ncclsafe.probes.source.syntax import FUNCTIONS, is_of_self, name_of

_COLLECTIONS = ("list", "dict", "set", "deque", "OrderedDict", "Counter")
# Functions of which each process has its own result: folders, identities, clocks, what is left of the machine.
_DIFFER = frozenset(
    (
        *("mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile"),
        *("getpid", "gethostname", "getfqdn", "uuid1", "uuid4", "token_hex"),
        *("time", "time_ns", "monotonic", "perf_counter", "now", "utcnow", "today", "strftime"),
        *("virtual_memory", "disk_usage", "mem_get_info"),
    )
)
_MOST_STEPS = 16


class Given(NamedTuple):
    """A value in the source, and where it is.

    Attributes:
        value: The expression; None if the source does not show it, as for what an import gives.
        is_part: Whether it is a part of what the expression makes, or that is a part of it.
        is_conditional: Whether the statement is in another one: a branch, a loop.
    """

    value: ast.expr | None
    scope: Scope
    line: int
    is_part: bool = False
    is_conditional: bool = False


def returned(scope: Scope) -> Given | None:
    """What a function returns, if there is only one place where it does."""
    returns = [one for one, _ in statements(scope.body) if isinstance(one, ast.Return)]
    value = returns[0].value if len(returns) == 1 else None
    return Given(value, scope, returns[0].lineno) if value is not None else None


def variable(name: str, made: Given) -> Given | None:
    """What a variable is at the line of another value, in its function or one around that."""
    before: float = made.line
    scope: Scope | None = made.scope
    while scope is not None:
        found = [one for one in assignments_of(name, scope) if one.line < before]
        if found or name in (*scope.parameters, *scope.collected):
            return _last(found)
        scope, before = scope.outer, float("inf")
    return None


def attribute(name: str, owner: type | None) -> Given | None:
    """What an attribute of ``self`` is, by the methods of its class; a hook takes precedence over ``__init__``."""
    methods = methods_of(owner)
    first = methods.pop("__init__", Scope())
    for some in (methods.values(), [first]):
        is_it = partial(_is_attribute, name=name)
        found = [given for method in some for given in assignments(method, is_it)]
        if found:
            return _last(found)
    return None


def only_assignment(name: str, owner: type) -> Given | None:
    """The one assignment to an attribute of ``self`` in all methods of a class and its bases.

    None if there are several, if it may be skipped, or if it is a constant or an empty list to be filled.
    """
    methods = (method for kind in owner.__mro__ for method in methods_in(kind))
    found = [given for method in methods for given in assignments(method, partial(_is_attribute, name=name))]
    return _last(found) if len(found) == 1 and not found[0].is_conditional else None


def different_for_each_process(value: ast.expr, made: Given) -> Given | None:
    """Where an expression's variables get a value that each process has for itself; None if nowhere or in many places.

    Args:
        value: The expression; its variables are followed to what they are computed from.
        made: Where the expression is.
    """
    found: dict[int, Given] = {}
    waiting, seen = [(value, made)], set[str]()
    while waiting and len(seen) < _MOST_STEPS:
        expression, given = waiting.pop()
        for name in {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)} - seen:
            seen.add(name)
            held = variable(name, given)
            if held is None or held.value is None:
                continue
            if any(isinstance(node, ast.Call) and name_of(node.func) in _DIFFER for node in ast.walk(held.value)):
                found[held.line] = held
            else:
                waiting.append((held.value, held))
    return next(iter(found.values())) if len(found) == 1 else None


def methods_of(owner: type | None) -> dict[str, Scope]:
    """The user's functions in a class and its bases, by name."""
    methods: dict[str, Scope] = {}
    for kind in owner.__mro__ if owner is not None else ():
        for method in methods_in(kind):
            methods.setdefault(method.name, method)
    return methods


def _last(found: list[Given]) -> Given | None:
    """The last assignment; None if any of several may have been made, or if it is an empty list to be filled."""
    if not found or (len(found) > 1 and (found[-1].is_conditional or len({one.scope.name for one in found}) > 1)):
        return None
    last = found[-1]
    if last.is_part:
        return last
    return None if _is_empty(last.value) or isinstance(last.value, ast.Constant) else last


def _is_empty(value: ast.expr | None) -> bool:
    """Whether it is an empty collection, or one of empty collections: ``[]``, ``[[]]``, ``dict()``."""
    if isinstance(value, (ast.List, ast.Tuple)):
        return all(map(_is_empty, value.elts))
    if isinstance(value, ast.Dict):
        return all(map(_is_empty, value.values))
    return isinstance(value, ast.Call) and name_of(value.func) in _COLLECTIONS and not (value.args or value.keywords)


def assignments(scope: Scope, is_it: Callable[[ast.AST | None], bool]) -> Iterator[Given]:
    """What a function gives to a variable or an attribute, in the order of its lines."""
    for statement, depth in statements(scope.body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value: ast.expr | None = getattr(statement, "iter", None) or getattr(statement, "value", None)
        parts = [part for one in targets if isinstance(one, (ast.Tuple, ast.List)) for part in one.elts]
        is_whole = any(map(is_it, targets))
        if is_whole or any(map(is_it, parts)):
            is_part = not is_whole or isinstance(statement, ast.AugAssign)
            # The variable of a loop is known within the loop only, where it is what is looped over.
            is_conditional = depth > 0 and not isinstance(statement, (ast.For, ast.AsyncFor))
            yield Given(value, scope, statement.lineno, is_part, is_conditional)
        elif any(map(is_it, _bound(statement))):
            yield Given(None, scope, statement.lineno)


def assignments_of(name: str, scope: Scope) -> Iterator[Given]:
    """What a function gives to a variable, in the order of its lines."""
    return assignments(scope, partial(_is_variable, name=name))


def _bound(statement: ast.stmt) -> Iterator[ast.AST]:
    """What else a statement gives a value to: names of imports, ``with … as``, ``:=``, functions and classes."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (ast.Name(id=one.asname or one.name.partition(".")[0]) for one in statement.names)
    elif isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        yield ast.Name(id=statement.name)
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        yield from (node for item in statement.items if item.optional_vars for node in ast.walk(item.optional_vars))
    yield from (node.target for node in ast.walk(statement) if isinstance(node, ast.NamedExpr))


def _is_variable(target: ast.AST | None, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _is_attribute(target: ast.AST | None, name: str) -> bool:
    return is_of_self(target) and target.attr == name


def statements(body: Iterable[ast.stmt], depth: int = 0) -> Iterator[tuple[ast.stmt, int]]:
    """Every statement of a function with its depth, in the order of lines; without those of functions and classes."""
    for statement in body:
        yield statement, depth
        if not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                for inner in getattr(statement, name, ()):
                    yield from statements(inner.body if not isinstance(inner, ast.stmt) else [inner], depth + 1)
