"""The line of the user's code that decides which data a loader has: a filter, a split, a list of files.

It follows the source back from where the Trainer gets the loader, through the names and classes that only pass the data
on, to the first line that does more. If one before it chooses among data by a known function, it is that one. Nothing
is executed.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lightning_ncclsafe.code.libraries import TRAINER_RUN, is_top_level
from lightning_ncclsafe.probes.process.control_flow import first_line, last_line, name_of, syntax_tree
from lightning_ncclsafe.probes.process.stacks import is_user_code

_MOST_STEPS = 16
_MOST_FRAMES = 200
# The positions of loaders among the arguments of the Trainer's methods; validate, test and predict have one.
_POSITIONS = {"train_dataloader": 1, "val_dataloader": 2}
_KEYWORDS = {"train_dataloader": "train_dataloaders", "val_dataloader": "val_dataloaders"}
_METHODS = ("fit", "validate", "test", "predict")
# Functions that choose among data, or list it, in PyTorch, numpy, pandas, scikit-learn, datasets and Python.
_CHOOSING = frozenset(
    (
        *("random_split", "train_test_split", "split", "shard", "shuffle", "sample", "choice", "choices"),
        *("permutation", "randperm", "filter", "select", "take", "skip", "islice", "drop_duplicates", "unique"),
        *("glob", "iglob", "rglob", "iterdir", "listdir", "scandir", "walk", "sorted", "set"),
    )
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_GENERATED = (ast.ListComp, ast.SetComp, ast.GeneratorExp)
_Body = list[ast.stmt]


class _Scope(NamedTuple):
    """A function, or a whole file.

    Attributes:
        name: Its name.
        body: Its statements.
        parameters: The names of its parameters.
        around: The class or function that it is in, and that one's, from inside out.
    """

    name: str
    body: _Body
    parameters: frozenset[str] = frozenset()
    around: tuple[ast.AST, ...] = ()


class _Given(NamedTuple):
    """A value in the source, and where it is.

    Attributes:
        value: The expression.
        scope: The function.
        line: The line of its statement.
        is_part: Whether it is a part of what the expression makes.
    """

    value: ast.expr
    scope: _Scope
    line: int
    is_part: bool = False


def data_made_at(given: Any, hook: str) -> str:
    """Where the data of a stage is made: ``"file:line in function"``; empty if the source does not show it.

    To be called below the Trainer's method, as the loaders may be an argument of that.

    Args:
        given: What has the hook, or the loaders themselves.
        hook: ``"train_dataloader"``, ``"val_dataloader"``, ….
    """
    with suppress(OSError, RecursionError, SyntaxError, ValueError):
        method = inspect.unwrap(getattr(type(given), hook)) if hasattr(type(given), hook) else None
        code = getattr(method, "__code__", None)
        if code is not None:
            return _place(code, _returned(code))
        frame = _caller_of_trainer(sys._getframe(1))
        if frame is not None:
            return _place(frame.f_code, _argument(frame.f_code, frame.f_lineno, hook))
    return ""


def _place(code: CodeType, made: _Given | None) -> str:
    decides: _Given | None = None
    for _ in range(_MOST_STEPS):
        if made is None or _chooses(made.value):
            break
        passed_on = None if made.is_part else _passed_on(made.value)
        decides = decides or (made if passed_on is None else None)
        origins = _origins(made.value) if passed_on is None else (passed_on,)
        earlier = next((found for one in origins if (found := _assigned(one, made)) is not None), None)
        if earlier is None:
            made = decides or made
            break
        made = earlier
    return f"{code.co_filename}:{made.line} in {made.scope.name}" if made is not None else ""


def _returned(code: CodeType) -> _Given | None:
    """What a hook returns, if there is only one place where it does."""
    scope = _scope_of(code)
    if scope is None:
        return None
    returns = [one for one in _statements(scope.body) if isinstance(one, ast.Return)]
    value = returns[0].value if len(returns) == 1 else None
    return _Given(value, scope, returns[0].lineno) if value is not None else None


def _argument(code: CodeType, line: int, hook: str) -> _Given | None:
    """What a call of the Trainer at this line is given."""
    scope = _scope_of(code)
    if scope is None:
        return None
    around = [one for one in _statements(scope.body) if first_line(one) <= line <= last_line(one)]
    if not around:
        return None
    calls = (node for node in ast.walk(around[-1]) if isinstance(node, ast.Call))
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


def _passed_on(value: ast.expr) -> ast.expr | None:
    """What an expression passes on as it is: to a name, or into a class; None if its own line decides."""
    if isinstance(value, (ast.Name, ast.Attribute)):
        return value
    if isinstance(value, (ast.Await, ast.Starred, ast.NamedExpr)):
        return _passed_on(value.value)
    if isinstance(value, _GENERATED):
        return _passed_on(value.generators[0].iter) if not value.generators[0].ifs else None
    if isinstance(value, (ast.List, ast.Tuple)):
        return _passed_on(value.elts[0]) if len(value.elts) == 1 else None
    if isinstance(value, ast.Dict):
        return _passed_on(value.values[0]) if len(value.values) == 1 else None
    if isinstance(value, ast.Subscript):
        return _passed_on(value.value) if isinstance(value.slice, ast.Constant) else None
    if isinstance(value, ast.Call) and name_of(value.func)[:1].isupper():
        named = next((one.value for one in value.keywords if one.arg == "dataset"), None)
        inner = named or next(iter(value.args), None)
        return None if inner is None else _passed_on(inner)
    return None


def _origins(value: ast.expr) -> Iterator[ast.expr]:
    """What an expression makes something else of: the object of the method it calls, the function's first argument."""
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
    """Whether an expression takes some of the data, or lists it: a known function, a condition, a comparison."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and name_of(node.func) in _CHOOSING:
            return True
        if isinstance(node, ast.comprehension) and node.ifs:
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Compare):
            return True
    return False


def _assigned(value: ast.expr, made: _Given) -> _Given | None:
    """What a name stands for, as the last assignment before it says; None if there is none."""
    if isinstance(value, ast.Name):
        return _variable(value.id, made)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
        return _attribute(value.attr, made.scope)
    return None


def _variable(name: str, made: _Given) -> _Given | None:
    before = made.line
    for scope in (made.scope, *_scopes_around(made.scope)):
        found = [given for given in _assignments(scope, name, ast.Name) if given.line < before]
        if found:
            return found[-1]
        if name in scope.parameters:
            return None
        before = sys.maxsize
    return None


def _attribute(name: str, scope: _Scope) -> _Given | None:
    """What an attribute of ``self`` is, rather as a hook sets it than as ``__init__`` does."""
    owner = next((one for one in scope.around if isinstance(one, ast.ClassDef)), None)
    functions = [one for one in owner.body if isinstance(one, _FUNCTIONS)] if owner is not None else []
    functions.sort(key=lambda one: one.name != "__init__")
    scopes = [_function_scope(one, scope.around[scope.around.index(owner) :]) for one in functions if owner]
    found = [given for each in scopes for given in _assignments(each, name, ast.Attribute)]
    known = [given for given in found if not (isinstance(given.value, ast.Constant) and given.value.value is None)]
    return known[-1] if known else None


def _assignments(scope: _Scope, name: str, kind: type[ast.expr]) -> Iterator[_Given]:
    """What a function gives to a variable, or to an attribute of ``self``, in the order of its lines."""
    for statement in _statements(scope.body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "iter", None) or getattr(statement, "value", None)
        for target in targets:
            if isinstance(target, kind) and name_of(target) == name and value is not None:
                yield _Given(value, scope, statement.lineno)
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
            if value is not None and any(isinstance(one, kind) and name_of(one) == name for one in parts):
                yield _Given(value, scope, statement.lineno, is_part=True)


def _statements(body: _Body) -> Iterator[ast.stmt]:
    """Every statement of a function, in the order of their lines, except those of functions and classes in it."""
    for statement in body:
        yield statement
        if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                for inner in getattr(statement, name, ()):
                    yield from _statements(inner.body if not isinstance(inner, ast.stmt) else [inner])


def _scope_of(code: CodeType) -> _Scope | None:
    """The function of a code object; None if it is not the user's, or its source cannot be read."""
    if not is_user_code(code.co_filename):
        return None
    tree = syntax_tree(code.co_filename)
    if is_top_level(code.co_name):
        return _Scope(code.co_name, tree.body)
    for node, around in _with_outer(tree, ()):
        if not isinstance(node, _FUNCTIONS) or node.name != code.co_name:
            continue
        # The first line of code with decorators is that of the first of them.
        if code.co_firstlineno in (node.lineno, *(one.lineno for one in node.decorator_list)):
            return _function_scope(node, around)
    return None


def _with_outer(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    yield node, around
    is_outer = isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module))
    for child in ast.iter_child_nodes(node):
        yield from _with_outer(child, (node, *around) if is_outer else around)


def _function_scope(node: ast.FunctionDef | ast.AsyncFunctionDef, around: tuple[ast.AST, ...]) -> _Scope:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return _Scope(node.name, node.body, frozenset(one.arg for one in arguments), around)


def _scopes_around(scope: _Scope) -> Iterator[_Scope]:
    """The functions around one, from inside out, and the file."""
    for depth, node in enumerate(scope.around):
        if isinstance(node, _FUNCTIONS):
            yield _function_scope(node, scope.around[depth + 1 :])
        elif isinstance(node, ast.Module):
            yield _Scope("<module>", node.body)


def _caller_of_trainer(frame: FrameType | None) -> FrameType | None:
    """The user's innermost frame outside of the Trainer's method; None if there is none."""
    is_outside = False
    for _ in range(_MOST_FRAMES):
        if frame is None or (is_outside and is_user_code(frame.f_code.co_filename)):
            return frame
        is_outside = is_outside or TRAINER_RUN.has(frame.f_code.co_filename, frame.f_code.co_name)
        frame = frame.f_back
    return None
