"""The line of the user's code that decides which data a loader has: a filter, a split, a list of files.

It follows the source back from where the Trainer gets the loader, through names and classes that only hold data, to the
first line that does more. If a line before that chooses among data by a known function, it is that one. Nothing is
executed, and where several lines may have made a value, none of them is named.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lightning_ncclsafe.code.libraries import TRAINER_RUN
from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.probes.process.stacks import is_user_code
from lightning_ncclsafe.probes.source.scopes import Scope, methods_in, scope_of
from lightning_ncclsafe.probes.source.syntax import FUNCTIONS, first_line, is_of_self, last_line, name_of

# All ranks wait while one reads the source, which may be on storage that hangs.
_MOST_S = 2.0
_MOST_STEPS = 16
_MOST_FRAMES = 200
# The positions of loaders among the arguments of the Trainer's methods; validate, test and predict have one.
_POSITIONS = {"train_dataloader": 1, "val_dataloader": 2}
_KEYWORDS = {"train_dataloader": "train_dataloaders", "val_dataloader": "val_dataloaders"}
_METHODS = ("fit", "validate", "test", "predict")
# Classes of PyTorch and Lightning that hold the data that they are given first, or as ``dataset``.
_HOLDERS = frozenset(
    (
        *("DataLoader", "StatefulDataLoader", "CombinedLoader", "Subset", "ConcatDataset", "ChainDataset"),
        *("StackDataset", "TensorDataset"),
    )
)
# Functions that choose among data, or list it, in PyTorch, numpy, pandas, scikit-learn, datasets and Python.
_CHOOSING = frozenset(
    (
        *("random_split", "train_test_split", "shard", "shuffle", "sample", "choice", "choices", "permutation"),
        *("randperm", "filter", "select", "islice", "drop_duplicates", "glob", "iglob", "rglob", "iterdir"),
        *("listdir", "scandir", "walk", "sorted"),
    )
)
_GENERATED = (ast.ListComp, ast.SetComp, ast.GeneratorExp)
_reading = SideThread("ncclsafe-source")


class _Given(NamedTuple):
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


def data_made_at(given: Any, hook: str) -> str:
    """Where the data of a stage is made: ``"file:line in function"``; empty if the source does not show it in time.

    To be called below the Trainer's method, as the loaders may be an argument of that. Does not raise.

    Args:
        given: What has the hook, or the loaders themselves.
        hook: ``"train_dataloader"``, ``"val_dataloader"``, ….
    """
    with suppress(Exception):  # not essential, whatever the user's objects and files do
        method = inspect.unwrap(getattr(type(given), hook)) if hasattr(type(given), hook) else None
        if isinstance(code := getattr(method, "__code__", None), CodeType):
            return _reading.call(partial(_of_hook, code, type(given)), _MOST_S)
        frame = _caller_of_trainer(sys._getframe(1))
        if frame is not None:
            own = frame.f_locals.get("self")
            owner = None if own is None else type(own)
            return _reading.call(partial(_of_argument, frame.f_code, frame.f_lineno, owner, hook), _MOST_S)
    return ""


def _of_hook(code: CodeType, owner: type) -> str:
    return _place(_returned(scope_of(code)), owner)


def _of_argument(code: CodeType, line: int, owner: type | None, hook: str) -> str:
    return _place(_argument(scope_of(code), line, hook), owner)


def _place(made: _Given | None, owner: type | None) -> str:
    """The line that decides what was made.

    Args:
        owner: The class of the object whose method made it; None if that is no method, or it is not known.
    """
    decides: _Given | None = None
    for _ in range(_MOST_STEPS):
        if made is None or made.value is None or _chooses(made.value):
            break
        held = None if made.is_part else _held(made.value)
        decides = decides or (made if held is None else None)
        origins = _origins(made.value) if held is None else (held,)
        assigned = (_assigned(one, made, owner) for one in origins)
        earlier = next((one for one in assigned if one is not None and one.value is not None), None)
        if earlier is None:
            break
        made = earlier
    found = made if made is not None and made.value is not None and _chooses(made.value) else decides or made
    return found.scope.place(found.line) if found is not None else ""


def _returned(scope: Scope) -> _Given | None:
    """What a hook returns, if there is only one place where it does."""
    returns = [one for one, _ in _statements(scope.body) if isinstance(one, ast.Return)]
    value = returns[0].value if len(returns) == 1 else None
    return _Given(value, scope, returns[0].lineno) if value is not None else None


def _argument(scope: Scope, line: int, hook: str) -> _Given | None:
    """What a call of the Trainer at this line is given."""
    around = [one for one, _ in _statements(scope.body) if first_line(one) <= line <= last_line(one)]
    calls = (node for node in ast.walk(around[-1]) if isinstance(node, ast.Call)) if around else iter(())
    call = next((one for one in calls if name_of(one.func) in _METHODS), None)
    value = _loaders_of(call, hook) if call is not None else None
    return _Given(value, scope, around[-1].lineno) if value is not None else None


def _loaders_of(call: ast.Call, hook: str) -> ast.expr | None:
    """The loaders among the arguments of a call of the Trainer; None if they are not written out there."""
    names = (_KEYWORDS.get(hook, ""), "dataloaders")
    named = next((one.value for one in call.keywords if one.arg in names), None)
    position = _POSITIONS.get(hook, 1) if name_of(call.func) == "fit" else 1
    is_plain = not any(isinstance(one, ast.Starred) for one in call.args)
    return named or (call.args[position] if is_plain and len(call.args) > position else None)


def _held(value: ast.expr) -> ast.expr | None:
    """The name or call whose data an expression holds as it is; None if its own line decides."""
    if isinstance(value, (ast.Name, ast.Attribute)):
        return value
    if isinstance(value, (ast.Await, ast.Starred, ast.NamedExpr)):
        return _held(value.value)
    if isinstance(value, (ast.List, ast.Tuple)):
        return _held(value.elts[0]) if len(value.elts) == 1 else None
    if isinstance(value, ast.Dict):
        return _held(value.values[0]) if len(value.values) == 1 else None
    if isinstance(value, ast.Subscript):
        return _held(value.value) if isinstance(value.slice, ast.Constant) else None
    if isinstance(value, ast.Call):
        inner = next((one.value for one in value.keywords if one.arg == "dataset"), None)
        if name_of(value.func) in _HOLDERS:
            inner = inner or next(iter(value.args), None)
        return None if inner is None else _held(inner)
    return None


def _origins(value: ast.expr) -> Iterator[ast.expr]:
    """What an expression turns into something else: the object of its method, its function's first argument."""
    if isinstance(value, (ast.Name, ast.Attribute)):
        yield value
    elif isinstance(value, ast.Subscript):
        yield from _origins(value.value)
    elif isinstance(value, _GENERATED):
        yield from _origins(value.generators[0].iter)
    elif isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute):
            yield from _origins(value.func.value)
        for argument in value.args[:1]:
            yield from _origins(argument)


def _chooses(value: ast.expr) -> bool:
    """Whether an expression takes some of the data, or lists it: by a known function, a condition, a comparison."""
    if isinstance(value, ast.Call):
        if name_of(value.func) in _CHOOSING:
            return True
        inner = [*value.args[:1], *(one.value for one in value.keywords if one.arg == "dataset")]
        inner += [value.func.value] if isinstance(value.func, ast.Attribute) else []
        return any(map(_chooses, inner))
    if isinstance(value, (ast.List, ast.Tuple, ast.Dict)):
        parts = value.values if isinstance(value, ast.Dict) else value.elts
        return len(parts) == 1 and _chooses(parts[0])
    if isinstance(value, ast.Subscript):
        return isinstance(value.slice, ast.Compare) or _chooses(value.value)
    if isinstance(value, _GENERATED):
        return bool(value.generators[0].ifs) or _chooses(value.generators[0].iter)
    return False


def _assigned(value: ast.expr, made: _Given, owner: type | None) -> _Given | None:
    """What a name means, by the last assignment before it; None if there is none, or if several are possible."""
    if isinstance(value, ast.Name):
        return _variable(value.id, made)
    if is_of_self(value):
        return _attribute(value.attr, owner)
    return None


def _variable(name: str, made: _Given) -> _Given | None:
    before: float = made.line
    scope: Scope | None = made.scope
    while scope is not None:
        assignments = _assignments(scope, partial(_is_variable, name=name))
        found = [one for one in assignments if one.line < before]
        if found or name in (*scope.parameters, *scope.collected):
            return _last(found)
        scope, before = scope.outer, float("inf")
    return None


def _attribute(name: str, owner: type | None) -> _Given | None:
    """What an attribute of ``self`` is, by the methods of its class; a hook takes precedence over ``__init__``."""
    methods: dict[str, Scope] = {}
    for kind in owner.__mro__ if owner is not None else ():
        for method in methods_in(kind):
            methods.setdefault(method.name, method)
    first = methods.pop("__init__", Scope())
    for some in (methods.values(), [first]):
        is_it = partial(_is_attribute, name=name)
        found = [given for method in some for given in _assignments(method, is_it)]
        if found:
            return _last(found)
    return None


def _last(found: list[_Given]) -> _Given | None:
    """The last assignment; None if any of several may have been made, or if it is an empty list to be filled."""
    if not found or (len(found) > 1 and (found[-1].is_conditional or len({one.scope.name for one in found}) > 1)):
        return None
    last = found[-1]
    if last.is_part:
        return last
    is_empty = isinstance(last.value, (ast.List, ast.Tuple)) and not last.value.elts
    is_empty = is_empty or (isinstance(last.value, ast.Dict) and not last.value.keys)
    return None if is_empty or isinstance(last.value, ast.Constant) else last


def _assignments(scope: Scope, is_it: Callable[[ast.AST | None], bool]) -> Iterator[_Given]:
    """What a function gives to a variable or an attribute, in the order of its lines."""
    for statement, depth in _statements(scope.body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value: ast.expr | None = getattr(statement, "iter", None) or getattr(statement, "value", None)
        parts = [part for one in targets if isinstance(one, (ast.Tuple, ast.List)) for part in one.elts]
        is_whole = any(map(is_it, targets))
        if is_whole or any(map(is_it, parts)):
            is_part = not is_whole or isinstance(statement, ast.AugAssign)
            # The variable of a loop is known within the loop only, where it is what is looped over.
            is_conditional = depth > 0 and not isinstance(statement, (ast.For, ast.AsyncFor))
            yield _Given(value, scope, statement.lineno, is_part, is_conditional)
        elif any(map(is_it, _bound(statement))):
            yield _Given(None, scope, statement.lineno)


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


def _statements(body: Iterable[ast.stmt], depth: int = 0) -> Iterator[tuple[ast.stmt, int]]:
    """Every statement of a function with its depth, in the order of lines; without those of functions and classes."""
    for statement in body:
        yield statement, depth
        if not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                for inner in getattr(statement, name, ()):
                    yield from _statements(inner.body if not isinstance(inner, ast.stmt) else [inner], depth + 1)


def _caller_of_trainer(frame: FrameType | None) -> FrameType | None:
    """The user's innermost frame outside of the Trainer's method; None if there is none."""
    is_outside = False
    for _ in range(_MOST_FRAMES):
        if frame is None or (is_outside and is_user_code(frame.f_code.co_filename)):
            return frame
        is_outside = is_outside or TRAINER_RUN.has(frame.f_code.co_filename, frame.f_code.co_name)
        frame = frame.f_back
    return None
