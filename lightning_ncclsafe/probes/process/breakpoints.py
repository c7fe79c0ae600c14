"""The call that has made the training thread pause in a debugger.

pdb pauses before the line that follows the call, until Python 3.13, which pauses at the call itself.
"""

import ast
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from lightning_ncclsafe.code.libraries import DEBUGGERS
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process.stacks import main_thread_frames, with_source
from lightning_ncclsafe.probes.source.scopes import Scope, scope_at, scope_of, scopes_of
from lightning_ncclsafe.probes.source.syntax import (
    FUNCTIONS,
    LOOPS,
    TRY_STATEMENTS,
    first_line,
    inside,
    last_line,
    name_of,
)

_NAMES = ("breakpoint", "set_trace")
_WITHS = (ast.With, ast.AsyncWith)
_DEFINITIONS = (*FUNCTIONS, ast.ClassDef)

_Statements = Sequence[ast.stmt]


def breakpoint_before(stack: Sequence[Frame]) -> Frame | None:
    """The call in the user's deepest function that has made the training thread pause where it is.

    It is at the very line, or the statement that runs before it. A line to which somebody has stepped, or at which an
    attached debugger pauses, has none before it. Reads source files.

    Args:
        stack: The training thread's stack.

    Returns:
        The frame at that call; None if the thread is not paused in a debugger, or not by a call that is known.
    """
    below = [*itertools.takewhile(lambda frame: not frame.user, reversed(stack))]
    if len(below) == len(stack) or not DEBUGGERS.has_any(below):
        return None
    paused = stack[-len(below) - 1]
    scope = scope_at(paused.file, paused.function, paused.line)
    line = _line_before(scope, paused.line, _globals_of(paused))
    return with_source([replace(paused, line=line)])[0] if line else None


def _line_before(scope: Scope, line: int, known: Mapping[str, Any]) -> int:
    """The line of the call; 0 if there is none, or if it is not known which."""
    lines = []
    for statement, following in _followed(scope.body):
        if any(_is_at(one, line) for one in (statement, *following)):
            expressions = (node for node in inside(statement) if isinstance(node, ast.expr))
            lines += [node.lineno for node in expressions if _enters_debugger(node, scope.file, known)]
    # Of several, as in two branches, any may have been called.
    return lines[0] if len({*lines}) == 1 else 0


def _followed(block: _Statements, after: _Statements = ()) -> Iterator[tuple[ast.stmt, _Statements]]:
    """Each statement that has no blocks, and those that may run after it.

    Args:
        block: The statements.
        after: What runs after the block.
    """
    for index, statement in enumerate(block):
        following = _first_of(block[index + 1 :]) or after
        blocks = [*_blocks(statement, following)]
        for inner, behind in blocks:
            yield from _followed(inner, behind)
        if not blocks and not isinstance(statement, _DEFINITIONS):
            yield statement, following


def _blocks(statement: ast.stmt, following: _Statements) -> Iterator[tuple[_Statements, _Statements]]:
    """The blocks of a statement, and for each what runs after it."""
    if isinstance(statement, (*LOOPS, *_WITHS)):
        # The head of a loop runs again, as does that of a `with` when its block is left.
        is_loop = isinstance(statement, LOOPS)
        yield statement.body, _first_of([statement]) if is_loop else [statement, *following]
        yield getattr(statement, "orelse", ()), following
    elif isinstance(statement, ast.If):
        yield statement.body, following
        yield statement.orelse, following
    elif isinstance(statement, ast.Match):
        yield from ((case.body, following) for case in statement.cases)
    elif isinstance(statement, TRY_STATEMENTS):
        left = _first_of(statement.finalbody) or following
        yield statement.body, _first_of(statement.orelse) or left
        yield from ((clause.body, left) for clause in statement.handlers)
        yield statement.orelse, left
        yield statement.finalbody, following


def _first_of(block: _Statements) -> list[ast.stmt]:
    """The statements of a block at which it may begin: some have no code."""
    for statement in block:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, (ast.Global, ast.Nonlocal)) or is_text:
            continue
        is_endless = isinstance(statement, ast.While) and isinstance(statement.test, ast.Constant)
        if is_endless or isinstance(statement, TRY_STATEMENTS):
            return [statement, *_first_of(getattr(statement, "body", ()))]
        return [statement]
    return []


def _is_at(statement: ast.stmt, line: int) -> bool:
    """Whether a line is of a statement, or of its head if it has blocks."""
    body = getattr(statement, "cases", None) or getattr(statement, "body", None)
    if not body:
        return first_line(statement) <= line <= last_line(statement)
    inner = body[0].pattern.lineno if isinstance(body[0], ast.match_case) else first_line(body[0])
    return first_line(statement) <= line <= max(statement.lineno, inner - 1)


def _enters_debugger(node: ast.expr, file: str, known: Mapping[str, Any]) -> bool:
    """Whether an expression makes a debugger pause; so do functions of the user's that do nothing else to the caller.

    Args:
        node: The expression, without what is in it.
        file: The file that it is in.
        known: The global names of that file.
    """
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) == "pu.db"
    if not isinstance(node, ast.Call):
        return False
    name, whole = name_of(node.func), ast.unparse(node.func)
    if name in _NAMES or (name == "settrace" and whole.startswith("pydevd")):
        return True
    function = inspect.unwrap(found) if isinstance(found := _named(node.func, known), FunctionType) else None
    if function is not None:
        code = function.__code__
        return DEBUGGERS.has(code.co_filename, code.co_name) or _pauses(scope_of(code))
    is_method = whole in (f"self.{name}", f"cls.{name}")
    return is_method and any(map(_pauses, (scope for scope in scopes_of(file) if scope.name == name)))


def _pauses(scope: Scope) -> bool:
    return any(scope.calls(_NAMES))


def _named(name: ast.expr, known: Mapping[str, Any]) -> object:
    """What a global name stands for, or a name in a module; None if that is unknown. It runs no code of the user's."""
    if isinstance(name, ast.Name):
        return known.get(name.id)
    owner = _named(name.value, known) if isinstance(name, ast.Attribute) else None
    return vars(owner).get(name_of(name)) if isinstance(owner, ModuleType) else None


def _globals_of(frame: Frame) -> Mapping[str, Any]:
    frames = (one for one in main_thread_frames() if one.f_code.co_filename == frame.file)
    return next((one.f_globals for one in frames), {})
