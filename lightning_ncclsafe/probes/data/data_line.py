"""The line of the user's code that decides which data a loader has, or how many batches of it.

For an iterable or a sampler of the user's own, that is where its ``__iter__`` yields: the loop, or the condition in it.
For data that is read by index, it is what ``__len__`` returns the length of. If that only hands on what the object was
given, and for all other data, it is where the data is made.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.facts import Branch, Decides
from lightning_ncclsafe.probes.data.made_at import chooses, function_called, made_at, place_of
from lightning_ncclsafe.probes.data.reading import goes_through_all, is_indices, is_iterable, plain_attribute
from lightning_ncclsafe.probes.data.shares import share_taken_at
from lightning_ncclsafe.probes.process.stacks import is_own_file
from lightning_ncclsafe.probes.source.assignments import (
    Given,
    methods_of,
    only_assignment,
    returned,
    variable,
)
from lightning_ncclsafe.probes.source.rank_names import RANK_WORDS
from lightning_ncclsafe.probes.source.scopes import SELECTING, Scope, getter_or_self, scope_of
from lightning_ncclsafe.probes.source.syntax import COMPREHENSIONS, FILLING, LOOPS, YIELDS, is_of_self, name_of

# All ranks wait while one reads the source, which may be on storage that hangs.
_MOST_S = 2.0
_MOST_CALLS = 4
_MOST_NAMES = 8
_WORKER = re.compile(r"\b(?:worker|worker_info|worker_id|num_workers|num_replicas)\b")
_reading = SideThread("ncclsafe-source")

# What stands in place of an attribute's name: a parameter of the function, what its base gives, several of them, and
# what the object was given.
_PARAMETER, _BASE, _SEVERAL, _GIVEN = "()", "super()", "*", "__init__()"
_Loop = ast.For | ast.AsyncFor | ast.While


class _DataEnd(NamedTuple):
    """What decides how much a function yields; nothing of that if several lines do, or it is not known.

    Attributes:
        place: The line, ``"file:line in __iter__"``.
        given: The attribute of ``self`` whose items it only hands on, or one of the names above.
    """

    place: str = ""
    given: str = ""


_UNKNOWN = _DataEnd()


def data_line(
    given: Any, hook: str, frame: FrameType | None, loaders: Sequence[Any] = (), *, by_length: bool = False
) -> str:
    """Where it is decided which data a stage has, or how many batches: ``"file:line in function"``; empty if unknown.

    Does not raise, and waits for no longer than 2 s.

    Args:
        given: What has the hook, or the loaders themselves.
        hook: The stage: ``"train_dataloader"``, ….
        frame: The innermost frame of the thread that runs the Trainer.
        loaders: The loaders, as Lightning iterates them, whose numbers of batches are asked about; the line is one of
            all of them. None where the question is which data it is.
        by_length: Whether nothing of them has been read yet, and the number of batches is the loader's length. Then
            the line is one of the loader's own objects, and none where those only have what they were given.
    """

    def search() -> str:
        if not loaders:
            return made_at(given, hook, frame)
        try:
            lines = {_ends_at(one, given, hook, frame, by_length) for one in loaders}
        finally:
            _handed_on_by_name.cache_clear()  # it holds the sources of files
        return lines.pop() if len(lines) == 1 else ""

    with suppress(Exception):  # not essential, whatever the user's objects and files do
        return _reading.call(search, _MOST_S)
    return ""


def _ends_at(loader: Any, given: Any, hook: str, frame: FrameType | None, by_length: bool) -> str:
    wrapped = plain_attribute(loader, "wrapped_loader")
    loader = loader if wrapped is None else wrapped  # not "or", which may call its __len__
    for one in _iterated(loader):
        if one is not loader and is_indices(one):
            return ""  # they decide, wherever they are made
        found = _of_object(one, by_length)
        if found.given not in (_BASE, _GIVEN):
            return found.place or ("" if by_length else share_taken_at(_method_of(type(one), "__iter__"), type(one)))
        if found.given == _GIVEN:
            break
    else:
        if place := _of_indexed(loader):
            return place
    return "" if by_length else made_at(given, hook, frame, loader)


def _iterated(loader: Any) -> Iterator[Any]:
    """What may decide how much there is: the loader, its samplers, its dataset."""
    yield loader
    batches, dataset = plain_attribute(loader, "batch_sampler"), plain_attribute(loader, "dataset")
    samplers = (batches, plain_attribute(batches, "sampler"), plain_attribute(loader, "sampler"))
    yield from (one for one in samplers if one is not None)
    if dataset is not None and (is_iterable(dataset) or not hasattr(type(dataset), "__getitem__")):
        yield dataset


def _of_object(one: Any, by_length: bool) -> _DataEnd:
    """What decides how often an object yields; what its base gives if its class is not the user's."""
    length = _of_length(_method_of(type(one), "__len__") if by_length else Scope())
    if length != _UNKNOWN:
        return _followed(length, type(one))
    scope = scope_of(one.gi_code) if isinstance(one, GeneratorType) else _method_of(type(one), "__iter__")
    if not scope.file:
        return _DataEnd(given=_BASE)
    found = _of_function(scope, type(one), _MOST_CALLS)
    # What it hands on may be another iterable of the user's own.
    within = plain_attribute(one, found.given) if found.given.isidentifier() else None
    end = _of_iterable(within)
    return end if end.place else _followed(found, type(one))


def _of_iterable(one: Any) -> _DataEnd:
    """The same of an object in an attribute, if its class is the user's and decides it; otherwise unknown."""
    scope = _method_of(type(one), "__iter__")
    end = _followed(_of_function(scope, type(one), _MOST_CALLS), type(one)) if scope.file else _UNKNOWN
    return end if end.place and end.given == "" else _UNKNOWN


def _of_indexed(loader: Any) -> str:
    """The line that decides how many samples there are, if all of them are read, by index; empty if it is unknown."""
    dataset, batches = plain_attribute(loader, "dataset"), plain_attribute(loader, "batch_sampler")
    sampler = plain_attribute(batches, "sampler")
    if not goes_through_all(sampler if sampler is not None else plain_attribute(loader, "sampler"), dataset):
        return ""
    return _followed(_of_length(_method_of(type(dataset), "__len__")), type(dataset)).place


def _method_of(kind: type, name: str) -> Scope:
    """A method of an object, if it is the user's; those of a loader may be replaced by ours."""
    defined = (vars(base)[name] for base in kind.__mro__ if name in vars(base))
    return scope_of(next((one for one in defined if not _is_ours(one)), None))


def _of_length(scope: Scope) -> _DataEnd:
    """What a function returns the length of; unknown if it computes the length."""
    made = returned(scope)
    if made is None:
        return _UNKNOWN
    counted = _counted(made.value)
    value = made.value if counted is None else counted
    found = _handed_on(value, scope, made.line)
    if found is None and value is not None and (_is_about_rank(value) or _slices(value)):
        return _DataEnd(scope.place(made.line))
    return found or _UNKNOWN


def _counted(value: ast.expr | None) -> ast.expr | None:
    """What an expression gives the length of; None if it gives anything else."""
    return value.args[0] if isinstance(value, ast.Call) and name_of(value.func) == "len" and value.args else None


def _counted_once(made: Given, owner: type) -> _DataEnd | None:
    """What decides the length of a list that a method returns: its share; of a list that it fills, the count itself.

    None for any other value, and any other list.
    """
    call = _counted(made.value)
    called = function_called(call, made.scope, owner) if isinstance(call, ast.Call) and _is_own_call(call) else None
    listed = returned(called) if called is not None else None
    if called is None or listed is None or listed.value is None:
        return None
    if _is_about_rank(listed.value):
        return _DataEnd(called.place(listed.line))
    filling = (one.func.value for one in called.calls(FILLING) if isinstance(one.func, ast.Attribute))
    is_filled = isinstance(listed.value, ast.Name) and name_of(listed.value) in map(name_of, filling)
    return _DataEnd(made.scope.place(made.line)) if is_filled else None


def _is_own_call(value: ast.expr | None) -> bool:
    """Whether it calls a method of the object, and gives it nothing but constants."""
    if not isinstance(value, ast.Call) or not is_of_self(value.func):
        return False
    return all(isinstance(one, ast.Constant) for one in (*value.args, *(each.value for each in value.keywords)))


def _followed(found: _DataEnd, owner: type) -> _DataEnd:
    """The same once attributes and properties of the class that only hold something are followed to what they hold."""
    for _ in range(_MOST_NAMES):
        if found.given in ("", _BASE, _PARAMETER):
            return found
        if (getter := _getter(owner, found.given)) is not None:
            found = _of_function(getter, owner, _MOST_CALLS)
            continue
        made = only_assignment(found.given, owner)
        if made is None or _is_filled(found.given, owner):
            break
        if (counted := _counted_once(made, owner)) is not None:
            return counted
        held = None if made.is_part else _handed_on(made.value, made.scope, made.line)
        if _is_parameter(made) or held == _DataEnd(given=_PARAMETER):
            return _DataEnd(given=_GIVEN)
        if held is None or held.given in ("", _BASE):
            return _DataEnd(place_of(made, owner, is_number=True))
        found = held
    return _UNKNOWN


def _is_filled(name: str, owner: type) -> bool:
    """Whether a method of a class adds to an attribute, or takes from it."""
    calls = (call for method in methods_of(owner).values() for call in method.calls(FILLING))
    filled = (call.func.value for call in calls if isinstance(call.func, ast.Attribute))
    return any(is_of_self(one) and one.attr == name for one in filled)


def _getter(owner: type, name: str) -> Scope | None:
    """The function behind a property of a class; None for any other attribute."""
    found = inspect.getattr_static(owner, name, None)
    function = getter_or_self(found)
    return None if function is found or function is None else scope_of(function)


def _is_ours(function: Any) -> bool:
    return is_own_file(getattr(getattr(function, "__code__", None), "co_filename", ""))


def _of_function(scope: Scope, owner: type, calls: int) -> _DataEnd:
    """What decides how much a generator function yields, or a function returns to be iterated."""
    yields = [node for node in scope.nodes if isinstance(node, YIELDS)]
    if not yields:
        returns = [one for one in scope.each(ast.Return) if one.value is not None]
        return _of_items(returns[0].value, returns[0].lineno, scope, owner, calls) if len(returns) == 1 else _UNKNOWN
    each = [_of_yield(one, scope, owner, calls) for one in yields]
    # One outside of all loops adds an item at most: the rest, at the end.
    found = {one for one in each if one is not None}
    return found.pop() if len(found) == 1 else _UNKNOWN


def _of_yield(node: ast.Yield | ast.YieldFrom, scope: Scope, owner: type, calls: int) -> _DataEnd | None:
    """What decides how often it yields; None if it does once at most, or equally often on all ranks."""
    loops, outer, inner = _around(node, scope)
    loop, conditions = loops[-1] if loops else None, outer
    if isinstance(node, ast.YieldFrom) and not _counts_as_one(node, loop, scope):
        found, conditions = _of_items(node.value, node.lineno, scope, owner, calls), [*outer, *inner]
        found = _with_loops(found, loops, scope, owner, calls)
    elif inner and (loop is not None or _is_in_loop(node, scope)):
        is_split = loop is not None and _splits(_looped_over(loop), scope)
        closing = [one for one in inner if not one.jump] if _is_filled_before(node, scope) else []
        return _UNKNOWN if outer or is_split else _only_line(closing or inner, scope)
    elif loop is None:
        return None
    else:
        found = _with_loops(_of_loop(loop, scope, owner, calls), loops[:-1], scope, owner, calls)
    if not conditions:
        return found
    # What is handed on is chosen by the condition around it; otherwise both decide.
    return _only_line(conditions, scope) if found.given else _UNKNOWN


def _is_filled_before(node: ast.Yield | ast.YieldFrom, scope: Scope) -> bool:
    """Whether it yields a batch that the function fills: what closes it decides, and not what leaves out samples."""
    name = name_of(node.value) if isinstance(node.value, ast.Name) else ""
    filling = (call.func for call in scope.calls(FILLING) if isinstance(call.func, ast.Attribute))
    return bool(name) and any(name_of(one.value) == name for one in filling)


def _counts_as_one(node: ast.YieldFrom, loop: _Loop | None, scope: Scope) -> bool:
    """Whether the loop decides how often: it takes this rank's part, or what it yields is as long on all ranks."""
    return loop is not None and (_is_common(node.value) or _splits(_looped_over(loop), scope))


def _of_loop(loop: _Loop, scope: Scope, owner: type, calls: int) -> _DataEnd:
    if isinstance(loop, ast.While):
        return _DataEnd(scope.place(loop.lineno))
    return _of_items(loop.iter, loop.lineno, scope, owner, calls)


def _with_loops(found: _DataEnd, loops: list[_Loop], scope: Scope, owner: type, calls: int) -> _DataEnd:
    """What decides if these loops are around: they do as well, unless they only have what the object was given."""
    own = _followed(found, owner)
    each = {own, *(_followed(_of_loop(one, scope, owner, calls), owner) for one in loops)}
    decide = {one for one in each if one.given not in (_GIVEN, _PARAMETER)}
    if decide <= {own}:
        return found
    return decide.pop() if len(decide) == 1 else _UNKNOWN


def _only_line(branches: list[Branch], scope: Scope) -> _DataEnd:
    lines = {branch.line for branch in branches}
    return _DataEnd(scope.place(lines.pop())) if len(lines) == 1 else _UNKNOWN


def _around(node: ast.AST, scope: Scope) -> tuple[list[_Loop], list[Branch], list[Branch]]:
    """The loops around it whose passes may differ between ranks, and the branches around and in the innermost one."""
    branches = scope.branches_around(getattr(node, "lineno", 0))
    loops = {one.lineno: one for one in scope.nodes if isinstance(one, LOOPS)}
    differing = (one for one in branches if one.on is Decides.PASSES and one.line in loops)
    passes = [one for one in differing if not _is_common(_looped_over(loops[one.line]))]
    after = branches.index(passes[-1]) + 1 if passes else 0
    outer, inner = ([one for one in part if one.on in SELECTING] for part in (branches[:after], branches[after:]))
    return [loops[one.line] for one in passes], outer, inner


def _is_in_loop(node: ast.AST, scope: Scope) -> bool:
    return any(node is inner for one in scope.nodes if isinstance(one, LOOPS) for inner in ast.walk(one))


def _looped_over(loop: _Loop) -> ast.expr:
    return loop.test if isinstance(loop, ast.While) else loop.iter


def _of_items(items: ast.expr | None, line: int, scope: Scope, owner: type, calls: int) -> _DataEnd:
    """What decides how many items there are in an expression at a line."""
    here, value = line, items
    for _ in range(_MOST_NAMES):
        called = function_called(value, scope, owner) if isinstance(value, ast.Call) and calls else None
        if called is not None and any(isinstance(node, YIELDS) for node in called.nodes):
            found = _of_function(called, owner, calls - 1)
            return found if found.given != _PARAMETER else _handed_on(value, scope, here) or _UNKNOWN
        share = returned(called) if called is not None and _is_own_call(value) else None
        if share is not None and share.value is not None and _is_about_rank(share.value):
            return _DataEnd(share.scope.place(share.line))
        if isinstance(value, ast.Call) and name_of(value.func) == "iter" and value.args:
            value = value.args[0]
        elif isinstance(value, ast.Name) and _handed_on(value, scope, here) is None:
            made = variable(value.id, Given(None, scope, here))
            if made is None or made.value is None or made.is_part or made.scope != scope:
                return _UNKNOWN
            here, value = made.line, made.value
        else:
            break
    return _handed_on(value, scope, here) or _DataEnd(scope.place(here))


def _handed_on(value: ast.expr | None, scope: Scope, line: int, names: int = _MOST_NAMES) -> _DataEnd | None:
    """What an expression hands on as it is: an attribute of ``self``, a parameter, or what the loop around it has.

    None if it does more than that.
    """
    if value is None or _is_about_rank(value):
        return None
    if is_of_self(value):
        return _DataEnd(given=value.attr)
    if isinstance(value, ast.Name):
        return _handed_on_by_name(value, scope, line, names)
    if isinstance(value, COMPREHENSIONS) and len(value.generators) == 1 and not value.generators[0].ifs:
        return _handed_on(value.generators[0].iter, scope, line, names)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and _is_common(value.right):
        return _handed_on(value.left, scope, line, names)
    is_plain = isinstance(value, ast.Call) and not chooses(value)
    return _handed_on_by_call(value, scope, line, names) if isinstance(value, ast.Call) and is_plain else None


def _handed_on_by_call(value: ast.Call, scope: Scope, line: int, names: int) -> _DataEnd | None:
    if name_of(value.func) == "super":
        return _DataEnd(given=_BASE)
    parts = [*value.args[name_of(value.func) == "map" :], *(one.value for one in value.keywords)]
    if isinstance(value.func, ast.Attribute) and not _is_imported(value.func.value, scope, line):
        parts.insert(0, value.func.value)
    handed = {_handed_on(one, scope, line, names) for one in parts if not _is_common(one)}
    if None in handed or not handed:
        return None
    return handed.pop() if len(handed) == 1 else _DataEnd(given=_SEVERAL)


@lru_cache(maxsize=1024)  # otherwise, each name in a chain of calls would multiply the work
def _handed_on_by_name(value: ast.Name, scope: Scope, line: int, names: int) -> _DataEnd | None:
    name = value.id
    if scope.passes_on(value):
        return _DataEnd(given=_PARAMETER) if name != "self" else None
    for block in (one for one in scope.nodes if isinstance(one, (ast.For, ast.With))):
        if (source := _bound_to(name, block)) is not None and block.lineno < line <= (block.end_lineno or 0):
            found = _handed_on(source, scope, block.lineno, names)
            # Whatever is read for each item of a loop, the loop decides how often that is.
            return found or (_DataEnd(scope.place(block.lineno)) if isinstance(block, ast.For) else None)
    made = variable(name, Given(None, scope, line))
    if not names or made is None or made.is_part:
        return _DataEnd(given=_SEVERAL)
    return _handed_on(made.value, scope, made.line, names - 1) if made.scope == scope else None


def _bound_to(name: str, block: ast.For | ast.With) -> ast.expr | None:
    """What a ``for`` or ``with`` statement gives to a variable, or takes it from; None if it does not."""
    bound: list[tuple[ast.expr | None, ast.expr]] = (
        [(block.target, block.iter)]
        if isinstance(block, ast.For)
        else [(item.optional_vars, item.context_expr) for item in block.items]
    )
    is_it = (
        (source, any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(target)))
        for target, source in bound
        if target is not None
    )
    return next((source for source, found in is_it if found), None)


def _is_imported(value: ast.expr, scope: Scope, line: int) -> bool:
    """Whether it is a module, or a part of one, as far as the source shows."""
    root = value
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return False
    made = variable(root.id, Given(None, scope, line))
    return root.id == "self" and root is value if made is None else made.value is None


def _is_common(value: ast.expr) -> bool:
    """Whether an expression is made of constants, as far as its names show: the same, or as long, on all ranks."""
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, (ast.Name, ast.Attribute)):
        return name_of(value).isupper() and not _is_about_rank(value)
    if isinstance(value, ast.BinOp):
        return _is_common(value.left) and _is_common(value.right)
    if isinstance(value, COMPREHENSIONS):
        return all(_is_common(one.iter) and not one.ifs for one in value.generators)
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
