"""The path that a loop of the main thread waits for, where each process has computed one of its own."""

import ast
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple, TypeGuard

from lightning_ncclsafe.probes.process.stacks import is_user_code, main_thread_frames
from lightning_ncclsafe.probes.source.assignments import Given, different_for_each_process
from lightning_ncclsafe.probes.source.scopes import Scope, scope_of
from lightning_ncclsafe.probes.source.syntax import argument_of, name_of

# Methods of a Path, and functions that are given one.
_ASKED = ("exists", "is_file", "is_dir", "isfile", "isdir", "glob", "iglob", "listdir", "iterdir", "stat", "access")


class _UnderWay(NamedTuple):
    """A call of the user's that is under way: its code, its line, and the class of its ``self``."""

    code: CodeType
    line: int
    owner: type | None


def own_path_at() -> str:
    """Where the path comes from that a loop waits for, if that is a value which each process has for itself.

    A folder with a time stamp, the process id, a hash of text, … By a search in the source of the loop, and of the
    calls that led to it, if these have given it the path.

    Returns:
        ``"file:line in function"``; empty if no path is waited for, or it is the same for all, as far as that shows.
    """
    calls = [*_calls()]
    if not calls:
        return ""
    scope = scope_of(calls[0].code)
    loops = scope.loops_around([calls[0].line])
    heads = (one for one in scope.each(ast.While) if loops and one.lineno == loops[0].first)
    asked = next((node for one in heads for node in ast.walk(one.test) if _asks_for_path(node)), None)
    return _origin(asked, calls) if asked is not None else ""


def _calls() -> Iterator[_UnderWay]:
    """The user's calls from the innermost one outwards, as far as no other code is between them."""
    for frame in main_thread_frames():
        if not is_user_code(frame.f_code.co_filename):
            return
        owner: Any = frame.f_locals.get("self")
        yield _UnderWay(frame.f_code, frame.f_lineno or 0, None if owner is None else type(owner))


def _asks_for_path(node: ast.AST) -> TypeGuard[ast.expr]:
    return isinstance(node, ast.Call) and name_of(node.func) in _ASKED


def _origin(path: ast.expr, calls: list[_UnderWay]) -> str:
    """Where a value in an expression comes from that each process has for itself; only one parameter is followed."""
    for call, outer in zip(calls, [*calls[1:], None], strict=True):
        scope = scope_of(call.code)
        own = different_for_each_process(path, Given(path, scope, call.line), call.owner)
        if own is not None:
            return own.scope.place(own.line)
        names = {name for node in ast.walk(path) if isinstance(node, ast.expr) and (name := scope.passes_on(node))}
        given = _given_to(scope, names.pop(), outer) if outer is not None and len(names) == 1 else None
        if given is None:
            return ""
        path = given
    return ""


def _given_to(scope: Scope, parameter: str, outer: _UnderWay) -> ast.expr | None:
    """What the outer call has given to a parameter of this function; None if that does not show."""
    inside = (call for call in scope_of(outer.code).calls([scope.name]) if call.lineno <= outer.line)
    call = next((one for one in inside if outer.line <= (one.end_lineno or 0)), None)
    is_method = scope.parameters[:1] in (("self",), ("cls",))
    return argument_of(call, parameter, position=scope.parameters.index(parameter) - is_method) if call else None
