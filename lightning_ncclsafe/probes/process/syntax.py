"""The syntax tree of a source file, and where its parts are and what they are called."""

import ast
import linecache
from contextlib import suppress

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
"""The nodes that define a function."""
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


def name_of(node: ast.expr) -> str:
    """The name of a variable or attribute; empty for any other expression."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def first_line(statement: ast.stmt) -> int:
    """The first line of a statement, including decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def last_line(node: ast.stmt | ast.expr) -> int:
    """The last line of a statement or expression."""
    return max(node.lineno, node.end_lineno or 0)
