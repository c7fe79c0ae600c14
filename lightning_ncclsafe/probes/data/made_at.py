"""The line of the user's code that makes a loader's data: a filter, a split, a list of files. A part of ``data_line``.

It follows the source back from where the Trainer gets the loader, through names and classes that only hold data, to the
first line that does more. If a line before that chooses among data by a known function, it is that one. Nothing is
executed, and where several lines may have made a value, none of them is named.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

from lightning_ncclsafe.code.libraries import TRAINER_CALL, TRAINER_RUN
from lightning_ncclsafe.probes.data.reading import plain_attribute
from lightning_ncclsafe.probes.process.stacks import is_user_code
from lightning_ncclsafe.probes.source.assignments import (
    Given,
    assignments_of,
    attribute,
    methods_of,
    returned,
    statements,
    variable,
)
from lightning_ncclsafe.probes.source.scopes import Scope, scope_of, scopes_of
from lightning_ncclsafe.probes.source.syntax import argument_of, first_line, is_of_self, last_line, name_of

_MOST_STEPS = 16
_MOST_CALLS = 4
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
        *("random_split", "train_test_split", "shard", "sample", "choice", "choices", "filter", "select", "islice"),
        *("drop_duplicates", "glob", "iglob", "rglob", "iterdir", "listdir", "scandir", "walk"),
        *("split_dataset_by_node", "split_by_node"),
    )
)
# Those that put all of it in another order.
_ORDERING = frozenset(("shuffle", "permutation", "randperm", "sorted"))
_IsChoice = Callable[[ast.expr], bool]
_GENERATED = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


def made_at(given: Any, hook: str, frame: FrameType | None, loader: Any = None) -> str:
    """Where the data of a stage is made: ``"file:line in function"``; empty if the source does not show it; may raise.

    Args:
        given: What has the hook, or the loaders themselves.
        hook: ``"train_dataloader"``, ``"val_dataloader"``, ….
        frame: The innermost frame of the thread that runs the Trainer: the loaders may be an argument of that.
        loader: One loader of the stage, as Lightning iterates it, if it is about the number of batches of that one.
    """
    is_number = loader is not None
    if (code := _code_of_hook(given, hook)) is not None:
        return place_of(returned(scope_of(code)), type(given), is_number=is_number)
    outside = _caller_of_trainer(frame)
    return _of_local(loader, outside) or (_of_argument(outside, hook) if outside is not None else "")


def _code_of_hook(given: Any, hook: str) -> CodeType | None:
    method = inspect.unwrap(getattr(type(given), hook)) if hasattr(type(given), hook) else None
    code = getattr(method, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _owner_in(frame: FrameType) -> type | None:
    own = frame.f_locals.get("self")
    return None if own is None else type(own)


def _of_argument(frame: FrameType, hook: str) -> str:
    return place_of(_argument(scope_of(frame.f_code), frame.f_lineno or 0, hook), _owner_in(frame))


def _of_local(loader: Any, frame: FrameType | None) -> str:
    """Where a loader or its dataset is made, by the variable in one of the frames around the Trainer that has it."""
    dataset = plain_attribute(loader, "dataset")
    frames = [*_user_frames(frame)]
    for wanted in (dataset, loader):
        for around in frames if wanted is not None else ():
            scope = scope_of(around.f_code)
            here = Given(None, scope, around.f_lineno or 0)
            held = None if wanted is dataset else dataset
            names = [name for name, value in [*around.f_locals.items()] if _is_it(value, wanted, held)]
            found = [variable(name, here) for name in names if name not in (*scope.parameters, *scope.collected)]
            known = (one for one in found if one is not None and one.value is not None)
            places = {place_of(one, _owner_in(around), is_number=True) for one in known}
            if places:
                return places.pop() if len(places) == 1 else ""
    return ""


def _is_it(value: Any, wanted: Any, dataset: Any) -> bool:
    """Whether it is what is wanted; Lightning may have made a loader anew, with a sampler, for the same dataset."""
    if value is wanted:
        return True
    is_loader = any(kind.__name__ == "DataLoader" for kind in type(value).__mro__)
    return is_loader and dataset is not None and plain_attribute(value, "dataset") is dataset


def place_of(made: Given | None, owner: type | None, *, is_number: bool = False) -> str:
    """The line that decides what was made; empty if none is known.

    Args:
        made: What was made.
        owner: The class of the object whose method made it; None if that is no method, or it is not known.
        is_number: Whether the question is how much of it there is, whatever its order.
    """
    found = _deciding(made, owner, _MOST_CALLS, takes if is_number else chooses)
    return found.scope.place(found.line) if found is not None else ""


def _deciding(made: Given | None, owner: type | None, calls: int, is_choice: _IsChoice) -> Given | None:
    """The value that decides what was made; it goes into so many calls of functions of the same file."""
    decides: Given | None = None
    for _ in range(_MOST_STEPS):
        if made is None or made.value is None or is_choice(made.value):
            break
        if (within := _chosen_within(made, owner, calls, is_choice)) is not None:
            return within
        held = None if made.is_part else _held(made.value)
        decides = decides or (made if held is None else None)
        origins = _origins(made.value) if held is None else (held,)
        assigned = (_assigned(one, made, owner) for one in origins)
        earlier = next((one for one in assigned if one is not None and one.value is not None), None)
        if earlier is None:
            break
        made = earlier
    return made if made is not None and made.value is not None and is_choice(made.value) else decides or made


def _chosen_within(made: Given, owner: type | None, calls: int, is_choice: _IsChoice) -> Given | None:
    """The value that chooses among the data of this expression: in a function of the same file, or as its indices."""
    for call in _making(made.value) if calls else ():
        scope = function_called(call, made.scope, owner)
        inside = _deciding(returned(scope), owner, calls - 1, is_choice) if scope is not None else None
        if inside is not None and inside.value is not None and is_choice(inside.value):
            return inside
        indices = _assigned(index, made, owner) if (index := _indices(call)) is not None else None
        if indices is not None and indices.value is not None and is_choice(indices.value):
            return indices
    return None


def _indices(call: ast.Call) -> ast.expr | None:
    """Which samples a ``Subset`` takes; None for any other call."""
    if name_of(call.func) != "Subset":
        return None
    return argument_of(call, "indices", position=1)


def function_called(call: ast.Call, scope: Scope, owner: type | None) -> Scope | None:
    """The function that a call in this scope calls: a method, or one of the same file; None if that is not known."""
    if is_of_self(call.func):
        return methods_of(owner).get(call.func.attr)
    return _function_named(call.func.id, scope) if isinstance(call.func, ast.Name) and scope.file else None


def _function_named(name: str, scope: Scope) -> Scope | None:
    """The only function that a name may mean in this scope: one in it or around it, and nothing imported or given."""
    around: Scope | None = scope
    while around is not None:
        given = [*assignments_of(name, around)]
        if given or name in (*around.parameters, *around.collected):
            outer = around
            known = (one for one in scopes_of(scope.file) if one.name == name and one.outer == outer)
            # Not a method of this name.
            found = [one for one in known if any(one.line <= first.line <= one.body[0].lineno for first in given)]
            return found[0] if len(given) == len(found) == 1 else None
        around = around.outer
    return None


def _making(value: ast.expr | None) -> Iterator[ast.Call]:
    """The calls in an expression that give the data which it holds, from outside in."""
    if isinstance(value, ast.Call):
        yield value
        if name_of(value.func) in _HOLDERS:
            yield from _making(argument_of(value, "dataset"))
        if isinstance(value.func, ast.Attribute):
            yield from _making(value.func.value)
        for argument in value.args[:1]:
            yield from _making(argument)


def _argument(scope: Scope, line: int, hook: str) -> Given | None:
    """What a call of the Trainer at this line is given."""
    around = [one for one, _ in statements(scope.body) if first_line(one) <= line <= last_line(one)]
    calls = (node for node in ast.walk(around[-1]) if isinstance(node, ast.Call)) if around else iter(())
    call = next((one for one in calls if name_of(one.func) in _METHODS), None)
    value = _loaders_of(call, hook) if call is not None else None
    return Given(value, scope, around[-1].lineno) if value is not None else None


def _loaders_of(call: ast.Call, hook: str) -> ast.expr | None:
    """The loaders among the arguments of a call of the Trainer; None if they are not written out there."""
    position = _POSITIONS.get(hook, 1) if name_of(call.func) == "fit" else 1
    return argument_of(call, _KEYWORDS.get(hook, ""), "dataloaders", position=position)


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
        inner = argument_of(value, "dataset")
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
    elif isinstance(value, ast.BinOp):
        yield from _origins(value.left)
    elif isinstance(value, _GENERATED):
        yield from _origins(value.generators[0].iter)
    elif isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute):
            yield from _origins(value.func.value)
        for argument in value.args[:1]:
            yield from _origins(argument)


def chooses(value: ast.expr) -> bool:
    """Whether an expression takes some of the data, lists it, or puts it in an order; by a function, or a condition."""
    return _is_choice_by(_CHOOSING | _ORDERING, value)


def takes(value: ast.expr) -> bool:
    """The same without what only puts it in an order, and so does not decide how much there is."""
    return _is_choice_by(_CHOOSING, value)


def _is_choice_by(functions: frozenset[str], value: ast.expr) -> bool:
    is_choice = partial(_is_choice_by, functions)
    if isinstance(value, ast.Call):
        if name_of(value.func) in functions:
            return True
        inner = [*value.args[:1], *(one.value for one in value.keywords if one.arg == "dataset")]
        inner += [value.func.value] if isinstance(value.func, ast.Attribute) else []
        return any(map(is_choice, inner))
    if isinstance(value, (ast.List, ast.Tuple, ast.Dict)):
        parts = value.values if isinstance(value, ast.Dict) else value.elts
        return len(parts) == 1 and is_choice(parts[0])
    if isinstance(value, ast.Subscript):
        # A slice of what has been put in an order takes some of it.
        is_slice_of_choice = isinstance(value.slice, ast.Slice) and chooses(value.value)
        return isinstance(value.slice, ast.Compare) or is_slice_of_choice or is_choice(value.value)
    if isinstance(value, _GENERATED):
        return bool(value.generators[0].ifs) or is_choice(value.generators[0].iter)
    return False


def _assigned(value: ast.expr, made: Given, owner: type | None) -> Given | None:
    """What a name means, by the last assignment before it; None if there is none, or if several are possible."""
    if isinstance(value, ast.Name):
        return variable(value.id, made)
    if is_of_self(value):
        return attribute(value.attr, owner)
    return None


def _caller_of_trainer(frame: FrameType | None) -> FrameType | None:
    """The user's innermost frame outside of the Trainer's method; None if there is none."""
    is_outside = False
    for _ in range(_MOST_FRAMES):
        if frame is None or (is_outside and is_user_code(frame.f_code.co_filename)):
            return frame
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        is_outside = is_outside or TRAINER_RUN.has(file, function) or TRAINER_CALL.has(file, function)
        frame = frame.f_back
    return None


def _user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The user's frames from this one on, from inside out."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if is_user_code(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back
