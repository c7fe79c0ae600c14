"""The line of the user's code that decides how many batches a loader has: for an uneven end, when it has come.

For an iterable or a sampler of the user's own, that is where its ``__iter__`` yields: the loop, or the condition in it.
If that only hands on what the object was given, and for all other data, it is where the data is made.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.facts import Branch, Decides
from lightning_ncclsafe.probes.data.made_at import chooses, function_called, made_at_by, place_of
from lightning_ncclsafe.probes.data.reading import is_indices, is_iterable, plain_attribute
from lightning_ncclsafe.probes.process.stacks import is_own_file
from lightning_ncclsafe.probes.source.assignments import Given, only_assignment, variable
from lightning_ncclsafe.probes.source.rank_names import RANK_WORDS
from lightning_ncclsafe.probes.source.scopes import Scope, scope_of
from lightning_ncclsafe.probes.source.syntax import COMPREHENSIONS, LOOPS, is_of_self, name_of

# The other ranks wait while one reads the source.
_MOST_S = 2.0
_MOST_CALLS = 4
_MOST_NAMES = 8
_DECIDE = (Decides.RANK, Decides.VALUE, Decides.EXCEPTION)
_WORKER = re.compile(r"\b(?:worker|worker_info|worker_id|num_workers|num_replicas)\b")
_reading = SideThread("ncclsafe-ends")


# What stands in place of an attribute's name: for a parameter of the function, what its base gives, several of them.
_PARAMETER, _BASE, _SEVERAL = "()", "super()", "*"
_Loop = ast.For | ast.AsyncFor | ast.While
_YIELDS = (ast.Yield, ast.YieldFrom)


class _DataEnd(NamedTuple):
    """What decides how much a function yields; nothing of that if several lines do, or it is not known.

    Attributes:
        place: The line, ``"file:line in __iter__"``.
        given: The attribute of ``self`` whose items it only hands on.
    """

    place: str = ""
    given: str = ""


_UNKNOWN = _DataEnd()


def data_ends_at(loader: Any, given: Any, hook: str, frame: FrameType | None) -> str:
    """Where it is decided how many batches a loader has: ``"file:line in function"``; empty if that is not known.

    Does not raise, and waits for no longer than 2 s.

    Args:
        loader: The loader as Lightning iterates it.
        given: What has the hook, or the loaders themselves.
        hook: The stage: ``"train_dataloader"``, ….
        frame: The innermost frame of the thread that runs the Trainer.
    """
    with suppress(Exception):  # not essential, whatever the user's objects and files do
        return _reading.call(partial(_ends_at, loader, given, hook, frame), _MOST_S)
    return ""


def _ends_at(loader: Any, given: Any, hook: str, frame: FrameType | None) -> str:
    loader = plain_attribute(loader, "wrapped_loader") or loader
    for one in _iterated(loader):
        if one is not loader and is_indices(one):
            return ""  # they decide, wherever they are made
        scope, owner = _iter_of(one), type(one)
        found = _of_function(scope, owner, _MOST_CALLS) if scope.file else _DataEnd(given=_BASE)
        if found.given != _BASE:
            made = only_assignment(found.given, owner) if found.given else None
            if made is None or not _is_parameter(made):
                return found.place or place_of(made, owner)
            break
    return made_at_by(given, hook, loader, frame)


def _iterated(loader: Any) -> Iterator[Any]:
    """What may decide how much there is: the loader, its samplers, its dataset."""
    yield loader
    batches, dataset = plain_attribute(loader, "batch_sampler"), plain_attribute(loader, "dataset")
    samplers = (batches, plain_attribute(batches, "sampler"), plain_attribute(loader, "sampler"))
    yield from (one for one in samplers if one is not None)
    if dataset is not None and (is_iterable(dataset) or not hasattr(type(dataset), "__getitem__")):
        yield dataset


def _iter_of(one: Any) -> Scope:
    """The function that an object is iterated by, if it is the user's; that of a loader may be replaced by ours."""
    if isinstance(one, GeneratorType):
        return scope_of(one.gi_code)
    defined = (vars(kind)["__iter__"] for kind in type(one).__mro__ if "__iter__" in vars(kind))
    return scope_of(next((one for one in defined if not _is_ours(one)), None))


def _is_ours(function: Any) -> bool:
    return is_own_file(getattr(getattr(function, "__code__", None), "co_filename", ""))


def _of_function(scope: Scope, owner: type, calls: int) -> _DataEnd:
    """What decides how much a generator function yields, or a function returns to be iterated."""
    yields = [node for node in scope.nodes if isinstance(node, _YIELDS)]
    if not yields:
        returns = [one for one in scope.each(ast.Return) if one.value is not None]
        return _of_items(returns[0].value, returns[0].lineno, scope, owner, calls) if len(returns) == 1 else _UNKNOWN
    each = [_of_yield(one, scope, owner, calls) for one in yields]
    # One outside of all loops adds an item at most: the rest, at the end.
    found = {one for one in each if one is not None}
    return found.pop() if len(found) == 1 else _UNKNOWN


def _of_yield(node: ast.Yield | ast.YieldFrom, scope: Scope, owner: type, calls: int) -> _DataEnd | None:
    """What decides how often it yields; None if it does once at most, or equally often on all ranks."""
    loop, outer, inner = _around(node, scope)
    conditions = outer
    if isinstance(node, ast.YieldFrom):
        found, conditions = _of_items(node.value, node.lineno, scope, owner, calls), [*outer, *inner]
    elif inner and (loop is not None or _is_in_loop(node, scope)):
        is_split = loop is not None and _splits(_looped_over(loop), scope)
        return _UNKNOWN if outer or is_split else _only_line(inner, scope)
    elif loop is None:
        return None
    elif isinstance(loop, ast.While):
        found = _DataEnd(scope.place(loop.lineno))
    else:
        found = _of_items(loop.iter, loop.lineno, scope, owner, calls)
    if not conditions:
        return found
    # What is handed on is chosen by the condition around it; otherwise both decide.
    return _only_line(conditions, scope) if found.given else _UNKNOWN


def _only_line(branches: list[Branch], scope: Scope) -> _DataEnd:
    lines = {branch.line for branch in branches}
    return _DataEnd(scope.place(lines.pop())) if len(lines) == 1 else _UNKNOWN


def _around(node: ast.AST, scope: Scope) -> tuple[_Loop | None, list[Branch], list[Branch]]:
    """The innermost loop around it whose passes may differ between ranks, and the branches around and in that loop."""
    branches = scope.branches_around(getattr(node, "lineno", 0))
    loops = {one.lineno: one for one in scope.nodes if isinstance(one, LOOPS)}
    differing = (one for one in branches if one.on is Decides.PASSES and one.line in loops)
    passes = [one for one in differing if not _is_common(_looped_over(loops[one.line]))]
    after = branches.index(passes[-1]) + 1 if passes else 0
    outer, inner = ([one for one in part if one.on in _DECIDE] for part in (branches[:after], branches[after:]))
    return loops[passes[-1].line] if passes else None, outer, inner


def _is_in_loop(node: ast.AST, scope: Scope) -> bool:
    return any(node is inner for one in scope.nodes if isinstance(one, LOOPS) for inner in ast.walk(one))


def _looped_over(loop: _Loop) -> ast.expr:
    return loop.test if isinstance(loop, ast.While) else loop.iter


def _of_items(items: ast.expr | None, line: int, scope: Scope, owner: type, calls: int) -> _DataEnd:
    """What decides how many items there are in an expression at a line."""
    here, value = line, items
    for _ in range(_MOST_NAMES):
        called = function_called(value, scope, owner) if isinstance(value, ast.Call) and calls else None
        if called is not None and any(isinstance(node, _YIELDS) for node in called.nodes):
            found = _of_function(called, owner, calls - 1)
            return found if found.given != _PARAMETER else _DataEnd(given=_handed_on(value, scope, here))
        if isinstance(value, ast.Call) and name_of(value.func) == "iter" and value.args:
            value = value.args[0]
        elif isinstance(value, ast.Name) and not _handed_on(value, scope, here):
            made = variable(value.id, Given(None, scope, here))
            if made is None or made.value is None or made.is_part or made.scope != scope:
                return _UNKNOWN
            here, value = made.line, made.value
        else:
            break
    attribute = _handed_on(value, scope, here)
    return _DataEnd(given=attribute) if attribute else _DataEnd(scope.place(here))


def _handed_on(value: ast.expr | None, scope: Scope, line: int, names: int = _MOST_NAMES) -> str:
    """The attribute of ``self``, or a parameter, whose items an expression hands on as they are; empty for none."""
    if value is None or _is_about_rank(value):
        return ""
    if is_of_self(value):
        return value.attr
    if isinstance(value, ast.Name):
        return _handed_on_by_name(value, scope, line, names)
    if isinstance(value, COMPREHENSIONS) and len(value.generators) == 1 and not value.generators[0].ifs:
        return _handed_on(value.generators[0].iter, scope, line, names)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and _is_common(value.right):
        return _handed_on(value.left, scope, line, names)
    is_plain = isinstance(value, ast.Call) and not chooses(value)
    return _handed_on_by_call(value, scope, line, names) if isinstance(value, ast.Call) and is_plain else ""


def _handed_on_by_call(value: ast.Call, scope: Scope, line: int, names: int) -> str:
    if name_of(value.func) == "super":
        return _BASE
    parts = [*value.args[name_of(value.func) == "map" :], *(one.value for one in value.keywords)]
    if isinstance(value.func, ast.Attribute) and not _is_imported(value.func.value, scope, line):
        parts.insert(0, value.func.value)
    handed = {_handed_on(one, scope, line, names) for one in parts if not _is_common(one)}
    return "" if "" in handed or not handed else handed.pop() if len(handed) == 1 else _SEVERAL


def _handed_on_by_name(value: ast.Name, scope: Scope, line: int, names: int) -> str:
    name = value.id
    if scope.passes_on(value):
        return _PARAMETER if name != "self" else ""
    for loop in scope.each(ast.For):
        targets = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
        if name in targets and loop.lineno < line <= (loop.end_lineno or 0):
            return _handed_on(loop.iter, scope, loop.lineno, names)
    made = variable(name, Given(None, scope, line))
    if not names or made is None or made.is_part:
        return _SEVERAL
    return _handed_on(made.value, scope, made.line, names - 1) if made.scope == scope else ""


def _is_imported(value: ast.expr, scope: Scope, line: int) -> bool:
    """Whether it is a module, or a part of one, as far as the source shows."""
    while isinstance(value, ast.Attribute):
        value = value.value
    if not isinstance(value, ast.Name):
        return False
    made = variable(value.id, Given(None, scope, line))
    return value.id == "self" and not is_of_self(value) if made is None else made.value is None


def _is_common(value: ast.expr) -> bool:
    """Whether an expression is made of constants, as far as its names tell: the same on all ranks."""
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, (ast.Name, ast.Attribute)):
        return name_of(value).isupper() and not _is_about_rank(value)
    if isinstance(value, ast.BinOp):
        return _is_common(value.left) and _is_common(value.right)
    return isinstance(value, ast.Call) and name_of(value.func) == "range" and all(map(_is_common, value.args))


def _splits(value: ast.expr, scope: Scope) -> bool:
    """Whether an expression, or a variable in it, is about the rank, its worker, or a part of the data."""
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    given = [one.value for one in scope.each(ast.Assign) for target in one.targets if name_of(target) in names]
    return any(_is_about_rank(one) or chooses(one) or _slices(one) for one in (value, *given))


def _slices(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Slice) for node in ast.walk(value))


def _is_about_rank(value: ast.expr) -> bool:
    text = ast.unparse(value)
    return bool(RANK_WORDS.search(text) or _WORKER.search(text))


def _is_parameter(made: Given) -> bool:
    """Whether it is what the object was given, as it is: a parameter, or several of them."""
    values = made.value.elts if isinstance(made.value, ast.Tuple) else [made.value]
    return all(one is not None and made.scope.passes_on(one) for one in values)
