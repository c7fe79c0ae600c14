"""Lines in the source of a hook of the user's: where it returns nothing, logs a key, or has the loop end."""

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

from lightning_ncclsafe.probes.stacks import is_user_code, rank_condition


class HookSource:
    """The source of one hook; empty where it cannot be read, or is not the user's.

    Args:
        hook: The method, or the code of a function. Its source file is read, so not on the training's thread.
    """

    def __init__(self, hook: Callable[..., Any] | CodeType | None) -> None:
        self.file, self._name, self._body = "", "", []
        code = hook if isinstance(hook, CodeType) else getattr(inspect.unwrap(hook), "__code__", None) if hook else None
        if code is not None and is_user_code(code.co_filename):
            self.file, self._name = code.co_filename, code.co_name
            self._body = _body_of(code.co_filename, code.co_firstlineno, code.co_name)

    def returns_nothing(self) -> tuple[str, ...]:
        """Where it returns ``None``: ``"file:line in training_step"``."""
        returns = (node for node in _inside(self._body) if isinstance(node, ast.Return) and _is_none(node.value))
        return tuple(self._place(node.lineno) for node in returns)

    def logs(self, key: str) -> int:
        """The line of the call of ``log`` or ``log_dict`` in which a key is written out; 0 if there is none."""
        calls = (node for node in _inside(self._body) if isinstance(node, ast.Call) and _is_log(node.func))
        return next((call.lineno for call in calls if key in _texts(call)), 0)

    def uses(self, attribute: str) -> int:
        """The first line that names ``self.attribute``; 0 if there is none."""
        named = (node for node in _inside(self._body) if isinstance(node, ast.Attribute) and node.attr == attribute)
        return next((node.lineno for node in named if isinstance(node.value, ast.Name)), 0)

    def calls_under_condition(self, name: str) -> tuple[str, ...]:
        """Where it calls a function of this name under a condition on the rank: ``"file:line in training_step"``."""
        calls = (node for node in _inside(self._body) if isinstance(node, ast.Call))
        lines = (call.lineno for call in calls if _is_call_of(call, name))
        return tuple(self._place(line) for line in lines if rank_condition(self.file, line))

    def stops(self) -> tuple[str, ...]:
        """Where it sets ``should_stop``: ``"file:line in training_step"``."""
        assigned = (node for node in _inside(self._body) if isinstance(node, ast.Assign))
        return tuple(self._place(node.lineno) for node in assigned if any(map(_is_should_stop, node.targets)))

    def may_end_iteration(self) -> tuple[str, ...]:
        """Where a ``StopIteration`` may leave it: it is raised, or ``next()`` is called without a default.

        Lightning raises one itself where ``on_train_batch_start`` returns -1.
        """
        ends = (
            node for node in _inside(self._body) if isinstance(node, (ast.Raise, ast.Call)) and _ends_iteration(node)
        )
        lines = [node.lineno for node in ends]
        if self._name == "on_train_batch_start":
            returns = (node for node in _inside(self._body) if isinstance(node, ast.Return))
            lines += [node.lineno for node in returns if node.value is not None and ast.unparse(node.value) == "-1"]
        return tuple(map(self._place, sorted(lines)))

    def _place(self, line: int) -> str:
        return f"{self.file}:{line} in {self._name}"

    def place(self, line: int) -> str:
        """``"file:line in hook"``; empty for line 0."""
        return self._place(line) if line else ""


def own_functions(kind: type) -> Iterator[Callable[..., Any]]:
    """The functions of a class and of those that it derives from, as far as they are the user's own."""
    for owner in kind.__mro__:
        code = (getattr(function, "__code__", None) for function in vars(owner).values())
        if any(is_user_code(found.co_filename) for found in code if found is not None):
            yield from (function for function in vars(owner).values() if inspect.isfunction(function))


def _body_of(file: str, line: int, name: str) -> list[ast.stmt]:
    functions = (function for function in _functions(file) if function.name == name)
    return next((function.body for function in functions if line in _first_lines(function)), [])


@lru_cache(maxsize=8)
def _functions(file: str) -> tuple[ast.FunctionDef, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _first_lines(function: ast.FunctionDef) -> list[int]:
    return [function.lineno, *(decorator.lineno for decorator in function.decorator_list)]


def _inside(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node of a function in the order of its lines, those of functions defined within aside."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for child in ast.iter_child_nodes(statement):
            yield from _inside([child])  # type: ignore[list-item]


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_call_of(call: ast.Call, name: str) -> bool:
    return getattr(call.func, "attr", getattr(call.func, "id", "")) == name


def _is_log(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in ("log", "log_dict")


def _is_should_stop(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == "should_stop"


def _ends_iteration(node: ast.Raise | ast.Call) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "next" and len(node.args) == 1
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return isinstance(raised, ast.Name) and raised.id == "StopIteration"


def _texts(call: ast.Call) -> set[object]:
    return {node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
