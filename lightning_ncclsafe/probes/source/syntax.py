"""The syntax tree of a source file, and where its parts are and what they are called."""

import ast
import linecache
from contextlib import suppress
from functools import lru_cache
from types import CodeType
from typing import TypeAlias, TypeGuard

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
"""The nodes that define a function."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TRIES = 3


def syntax_tree(file: str) -> ast.Module:
    """The syntax tree of a source file, which is read; empty if it cannot be read or parsed."""
    return parsed("".join(linecache.getlines(file)))


def parsed(source: str) -> ast.Module:
    """The syntax tree of a source text; empty if it cannot be parsed."""
    for _ in range(_TRIES):
        with suppress(SystemError):  # if another thread parses, too (cpython#106905)
            try:
                return ast.parse(source)
            except (SyntaxError, ValueError, RecursionError):
                break
    return ast.Module(body=[], type_ignores=[])


@lru_cache(maxsize=8)
def functions_in(file: str) -> tuple[Function, ...]:
    """All functions of a source file, methods and inner ones too."""
    return tuple(node for node in ast.walk(syntax_tree(file)) if isinstance(node, FUNCTIONS))


def function_of(code: CodeType) -> Function | None:
    """The function of a code object; None if its source cannot be read."""
    for function in functions_in(code.co_filename):
        # The first line of code with decorators is that of the first of them.
        if function.name == code.co_name and first_line(function) == code.co_firstlineno:
            return function
    return None


def name_of(node: ast.expr) -> str:
    """The name of a variable or attribute; empty for any other expression."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def is_of_self(node: ast.AST | None) -> TypeGuard[ast.Attribute]:
    """Whether it is an attribute of ``self``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def first_line(statement: ast.stmt) -> int:
    """The first line of a statement, including decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def last_line(node: ast.stmt | ast.expr) -> int:
    """The last line of a statement or expression."""
    return max(node.lineno, node.end_lineno or 0)
