"""The path for which a loop of the main thread waits, where each process has computed one of its own."""

import ast
import multiprocessing
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lightning_ncclsafe.probes.process.stacks import is_user_code, main_thread_frames
from lightning_ncclsafe.probes.source.assignments import Given
from lightning_ncclsafe.probes.source.own_values import own_value_in
from lightning_ncclsafe.probes.source.scopes import Scope, scope_of
from lightning_ncclsafe.probes.source.syntax import argument_of, last_line, name_of

# Methods of a Path, and functions of os.path, by which a loop asks whether there is something yet.
_METHODS, _FUNCTIONS = ("exists", "is_file", "is_dir"), ("exists", "isfile", "isdir")
_OF_MODULES = ("os.path", "path", "osp")
# A path of its own is meant where another process or thread is told it.
_STARTING = frozenset(("Popen", "run", "call", "check_call", "check_output", "system", "Process", "Thread", "submit"))


class _UnderWay(NamedTuple):
    """A call of the user's that is under way: its function, and the line that it is at."""

    scope: Scope
    line: int
    owner: type | None


def own_path_at() -> str:
    """Where a value is computed that each process has for itself, of which the path is made that a loop waits for.

    The loop only pauses until the path exists. The value is the time, or a ``hash()``; it is followed through the
    source of the loop, and of the calls that led to it, as far as these have given it the path.

    Returns:
        ``"file:line in function"``; empty if no path is waited for, or it is the same for all, as far as that shows, or
        if one of these functions starts a process or thread, which may be to make that path.
    """
    if multiprocessing.parent_process() is not None:
        return ""  # what was computed before the fork is the same in all ranks
    calls = _calls(main_thread_frames())
    innermost = next(calls, None)
    asked = _asked_for(innermost) if innermost is not None else None
    return _origin(asked, innermost, calls) if innermost is not None and asked is not None else ""


def _calls(frames: Iterator[FrameType]) -> Iterator[_UnderWay]:
    """The user's calls from the innermost one outwards, as far as no other code is between them."""
    for frame in frames:
        if not is_user_code(frame.f_code.co_filename):
            return
        yield _UnderWay(scope_of(frame.f_code), frame.f_lineno or 0, _class_of(frame.f_code, frame.f_globals))


def _class_of(code: CodeType, names: dict[str, Any]) -> type | None:
    """The class of a module that has a method with this code, if no other class is below it.

    Not the class of ``self``: to read that from a frame keeps all of its variables alive before Python 3.13.
    """
    kinds = (one for one in [*names.values()] if isinstance(one, type))
    methods = ((kind, vars(kind).get(code.co_name)) for kind in kinds)
    found = next((kind for kind, method in methods if getattr(method, "__code__", None) is code), None)
    # Classes below it may set its attributes anew. Of a metaclass, the attribute is not bound.
    return None if found is None or type.__subclasses__(found) else found


def _asked_for(call: _UnderWay) -> ast.expr | None:
    """The path that must exist for the loop to end in which this call pauses; None if the loop does anything else."""
    scope, line, _ = call
    heads = (one for one in scope.each(ast.While) if len(one.body) == 1 and _is_pause(one.body[0], line))
    negated = (
        node.operand
        for one in heads
        for node in ast.walk(one.test)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )
    return next(filter(None, map(_path_in, negated)), None)


def _is_pause(statement: ast.stmt, line: int) -> bool:
    """Whether a statement at this line does nothing but sleep."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    is_there = statement.lineno <= line <= last_line(statement)
    return is_there and isinstance(call, ast.Call) and name_of(call.func) == "sleep"


def _path_in(asked: ast.expr) -> ast.expr | None:
    """The path whose existence is asked for: ``path.exists()``, ``os.path.exists(path)``."""
    if not isinstance(asked, ast.Call):
        return None
    if not asked.args and isinstance(asked.func, ast.Attribute) and asked.func.attr in _METHODS:
        return asked.func.value
    is_function = isinstance(asked.func, ast.Name) or (
        isinstance(asked.func, ast.Attribute) and ast.unparse(asked.func.value) in _OF_MODULES
    )
    return asked.args[0] if is_function and name_of(asked.func) in _FUNCTIONS and len(asked.args) == 1 else None


def _origin(path: ast.expr, call: _UnderWay, outer: Iterator[_UnderWay]) -> str:
    """Where the value is computed, in this function or in one that has given it the path."""
    if any(True for _ in call.scope.calls(_STARTING)):
        return ""
    own = own_value_in(path, Given(path, call.scope, call.line), call.owner)
    if own is not None:
        return own.scope.place(own.line) if not any(True for _ in own.scope.calls(_STARTING)) else ""
    names = {name for node in ast.walk(path) if isinstance(node, ast.expr) and (name := call.scope.passes_on(node))}
    caller = next(outer, None) if len(names) == 1 else None
    given = _given_to(call.scope, names.pop(), caller) if caller is not None else None
    return _origin(given, caller, outer) if caller is not None and given is not None else ""


def _given_to(scope: Scope, parameter: str, caller: _UnderWay) -> ast.expr | None:
    """What the caller has given to a parameter of this function; None if that does not show."""
    calls = (one for one in caller.scope.calls([scope.name]) if one.lineno <= caller.line <= last_line(one))
    call = next(calls, None)
    is_method = scope.parameters[:1] in (("self",), ("cls",))
    # Behind *args, parameters are given by name only.
    position = -1 if scope.collected else scope.parameters.index(parameter) - is_method
    return argument_of(call, parameter, position=position) if call is not None else None
