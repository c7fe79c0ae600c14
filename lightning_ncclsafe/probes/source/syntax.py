"""The syntax tree of a source file, and where its parts are and what they are called."""

import ast
import linecache
import tokenize
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from types import ModuleType
from typing import TypeAlias, TypeGuard

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
"""The nodes that define a function."""
LOOPS = (ast.For, ast.AsyncFor, ast.While)
TRY_STATEMENTS = (ast.Try, getattr(ast, "TryStar", ast.Try))
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
YIELDS = (ast.Yield, ast.YieldFrom)
FILLING = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "discard", "clear")
"""The methods by which a list, set or dictionary comes to hold more, or less."""
_TRIES = 3
BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
"""The nodes that may have statements in them; all others are expressions and the like."""


def file_of(module: object) -> str:
    """The source file of a module; empty if it has none. One that is loaded lazily is not imported for that."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else ""


def source_text(file: str) -> str:
    """The text of a source file, which is read; empty if it cannot be."""
    return "".join(linecache.getlines(file))


def syntax_tree(file: str) -> ast.Module:
    """The syntax tree of a source file, which is read; empty if it cannot be read or parsed."""
    return parsed(source_text(file))


def without_comment(line: str) -> str:
    """A line of source without the comment at its end; one that begins in the middle of a string is kept."""
    code = line.strip()
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(iter([code]).__next__) if "#" in code else ():
            if token.type == tokenize.ERRORTOKEN:  # until Python 3.12, which raises; the rest means nothing
                break
            if token.type == tokenize.COMMENT:
                return code[: token.start[1]].rstrip()
    return code


def parsed(source: str) -> ast.Module:
    """The syntax tree of a source text; empty if it cannot be parsed."""
    for _ in range(_TRIES):
        with suppress(SystemError):  # if another thread parses, too (cpython#106905)
            try:
                return _parse(source)
            except (SyntaxError, ValueError, RecursionError):
                break
    return ast.Module(body=[], type_ignores=[])


# A look asks for what several modules find in the same few files; nobody changes a tree.
@lru_cache(maxsize=8)
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def statements_in(block: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every statement and clause of these, those of functions and classes too; what contains others comes first.

    Most nodes of a file are expressions: it takes a fifth of the time of ``ast.walk``.
    """
    left = deque(block)
    while left:
        node = left.popleft()
        yield node
        left += (child for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS))


def nodes_in(block: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every node of these statements in the order of lines, except those of functions and classes defined in them."""
    # Without recursion: an expression may be as deep as the parser allows.
    left = [*block][::-1]
    while left:
        node = left.pop()
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node
            left += [*ast.iter_child_nodes(node)][::-1]


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all nodes in it, except in lambdas, which are only defined there."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Lambda):
            yield from inside(child)


def calls_within(node: ast.AST) -> list[ast.Call]:
    """The calls in a node, except in lambdas, which are only defined there."""
    return [inner for inner in inside(node) if isinstance(inner, ast.Call)]


def name_of(node: ast.expr) -> str:
    """The name of a variable or attribute; empty for any other expression."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def argument_of(call: ast.Call, *names: str, position: int = -1) -> ast.expr | None:
    """What a call gives to a parameter; None if it does not show.

    Args:
        call: The call.
        names: Names of the parameter.
        position: Its position among the arguments; -1 if it is always named.
    """
    named = next((one.value for one in call.keywords if one.arg in names), None)
    if named is not None or any(isinstance(one, ast.Starred) for one in call.args):
        return named
    return call.args[position] if 0 <= position < len(call.args) else None


def is_of_self(node: ast.AST | None) -> TypeGuard[ast.Attribute]:
    """Whether it is an attribute of ``self``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def is_constant(node: ast.expr, value: bool | None) -> bool:
    """Whether it is this constant."""
    return isinstance(node, ast.Constant) and node.value is value


def is_any_constant(node: ast.expr) -> bool:
    """Whether it is a constant, whichever."""
    return isinstance(node, ast.Constant)


def is_zero(node: ast.expr) -> bool:
    """Whether it is 0 as a constant: ``0`` or ``0.0``."""
    return isinstance(node, ast.Constant) and node.value == 0


def first_line(statement: ast.stmt) -> int:
    """The first line of a statement, including decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def last_line(node: ast.stmt | ast.expr) -> int:
    """The last line of a statement or expression."""
    return max(node.lineno, node.end_lineno or 0)
