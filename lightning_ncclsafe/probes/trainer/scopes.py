"""The user's functions as source, by file: those that the main thread is in, and the others of the same files."""

import ast
import inspect
import linecache
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from lightning_ncclsafe.code.libraries import TRAINER, is_top_level
from lightning_ncclsafe.probes.process.stacks import is_user_code, main_thread_frames
from lightning_ncclsafe.probes.source.syntax import FUNCTIONS, first_line, syntax_tree
from lightning_ncclsafe.probes.trainer.source_lines import inside


class Scope(NamedTuple):
    """A function, or the statements of a file outside of its functions.

    Attributes:
        file: Path of the file.
        name: Its name; ``"<module>"`` for a file.
        line: Its first line, decorators included; 1 for a file.
        nodes: Every node in it, in the order of lines, without those of the functions in it.
        parameters: Names of its parameters, in the order of positions.
        rebound: Names that it gives another value.
    """

    file: str
    name: str
    line: int
    nodes: tuple[ast.AST, ...]
    parameters: tuple[str, ...] = ()
    rebound: frozenset[str] = frozenset()

    def place(self, line: int) -> str:
        """``"file:line in function"``."""
        return f"{self.file}:{line} in {self.name}"

    def passes_on(self, value: ast.expr) -> str:
        """The parameter whose value this is, as the function was given it; empty for any other expression."""
        name = value.id if isinstance(value, ast.Name) else ""
        return name if name in self.parameters and name not in self.rebound else ""


class Entered(NamedTuple):
    """A function of the user's that the main thread is in.

    Attributes:
        scope: Its source.
        line: The line that it is at.
        called: Name of the function that it has called there.
    """

    scope: Scope
    line: int
    called: str


@lru_cache(maxsize=8)
def scopes_of(file: str) -> tuple[Scope, ...]:
    """All functions of a file, and the file itself; reads it."""
    tree = syntax_tree(file)
    functions = (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
    whole = Scope(file, "<module>", 1, tuple(inside(tree.body)))
    return (whole, *(_scope(file, function) for function in functions))


def mentions(file: str, words: frozenset[str]) -> bool:
    """Whether a file contains one of these words: most do not, and need not be parsed; reads it."""
    text = "".join(linecache.getlines(file))
    return any(word in text for word in words)


def entered_outside(trainer: Any) -> tuple[Entered, ...]:
    """The user's functions that have called the Trainer, innermost first; empty if the main thread is not in it."""
    frames = [*main_thread_frames()]
    calls = [index for index, frame in enumerate(frames) if _is_of(trainer, frame)]
    found = []
    for index in range(calls[-1] + 1 if calls else len(frames), len(frames)):
        code, called = frames[index].f_code, frames[index - 1].f_code.co_name
        scope = scope_of(code)
        if scope is not None:
            found.append(Entered(scope, frames[index].f_lineno or 0, called))
    return tuple(found)


def entered() -> Iterator[Scope]:
    """All of the user's functions that the main thread is in, innermost first."""
    scopes = (scope_of(frame.f_code) for frame in main_thread_frames())
    return (scope for scope in scopes if scope is not None)


def scopes_in(owners: Iterable[Any]) -> Iterator[Scope]:
    """The user's functions in the classes of these objects and their bases, of each class once."""
    for kind in dict.fromkeys(kind for owner in owners if owner is not None for kind in type(owner).__mro__):
        functions = (inspect.unwrap(function) for function in vars(kind).values() if inspect.isfunction(function))
        codes = (getattr(function, "__code__", None) for function in functions)
        scopes = (scope_of(code) for code in codes if isinstance(code, CodeType))
        yield from (scope for scope in scopes if scope is not None)


def scope_of(code: CodeType) -> Scope | None:
    """The source of a function; None if it is not the user's, or cannot be read."""
    if not is_user_code(code.co_filename):
        return None
    line = 1 if is_top_level(code.co_name) else code.co_firstlineno
    scopes = scopes_of(code.co_filename)
    return next((scope for scope in scopes if (scope.name, scope.line) == (code.co_name, line)), None)


def _is_of(trainer: Any, frame: Any) -> bool:
    code = frame.f_code
    return TRAINER.has(code.co_filename, code.co_name) and frame.f_locals.get("self") is trainer


def _scope(file: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Scope:
    nodes = tuple(inside(function.body))
    given = function.args
    parameters = tuple(one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    rebound = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return Scope(file, function.name, first_line(function), nodes, parameters, frozenset(rebound))
