"""Source code as the parser sees it; each file is parsed once in a process."""

import ast
from collections.abc import Callable, Iterator
from functools import cache


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(source)))


def statements_of(tree: ast.AST, without: Callable[[ast.AST], bool] = lambda node: False) -> Iterator[ast.AST]:
    """All statements on any level, but not what is in their expressions, where most nodes of a tree are.

    Args:
        without: Statements that are left out, with those that are in them.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)) and not without(node):
            yield node
            yield from statements_of(node, without)
