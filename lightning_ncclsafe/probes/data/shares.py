"""The line that takes a rank's share of its data: every n-th item, or the range of them that is the rank's.

A part of ``data_line``.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Collection

from lightning_ncclsafe.facts import Decides
from lightning_ncclsafe.probes.data.made_at import function_called, takes
from lightning_ncclsafe.probes.source.assignments import methods_of
from lightning_ncclsafe.probes.source.rank_names import RANK_WORDS
from lightning_ncclsafe.probes.source.scopes import SELECTING, Scope
from lightning_ncclsafe.probes.source.syntax import FILLING, YIELDS, is_of_self, name_of

_MOST_CALLS = 4
# islice(rows, rank, None, world_size)
_BOUNDS = 2
_FLAG = re.compile(r"(?:else of )?if (?:not )?self\.(\w+):  \(line ")
_LENGTH = re.compile(r"(?:else of )?if len\((?:self\.)?(\w+)\) [<>=!]=? [\w.]+:  \(line ")


def share_taken_at(iterates: Scope, owner: type) -> str:
    """The only line that takes a rank's share of what an object iterates; empty if there is none, or another decides.

    Asked where several lines decide how much the object yields. If they drop nothing, what differs between ranks is
    their shares.
    """
    read = _with_called(iterates, owner)
    flags = _set_in_init_only(owner)
    if any(_leaves_out(scope, flags) for scope in read):
        return ""
    lines = {scope.place(node.lineno) for scope in read for node in scope.each(ast.expr) if _is_share(node, scope)}
    attributes = {node.attr for scope in read for node in scope.each(ast.Attribute) if is_of_self(node)}
    made = methods_of(owner).get("__init__", Scope())
    for given in made.each(ast.Assign):
        if any(is_of_self(target) and name_of(target) in attributes for target in given.targets):
            nodes = [node for node in ast.walk(given.value) if isinstance(node, ast.expr)]
            lines |= {made.place(node.lineno) for node in nodes if _is_share(node, made)}
            called = (function_called(node, made, owner) for node in nodes if isinstance(node, ast.Call))
            each = ((scope, node) for scope in called if scope is not None for node in scope.each(ast.expr))
            lines |= {scope.place(node.lineno) for scope, node in each if _is_share(node, scope)}
    return lines.pop() if len(lines) == 1 else ""


def _with_called(scope: Scope, owner: type) -> list[Scope]:
    """A function, and those that it calls, as far as they are known."""
    found = {scope: None}
    for _ in range(_MOST_CALLS):
        called = [function_called(call, scope, owner) for scope in found for call in scope.each(ast.Call)]
        found |= {scope: None for scope in called if scope is not None}
    return [*found]


def _set_in_init_only(owner: type) -> set[str]:
    """The attributes of ``self`` that ``__init__`` alone sets."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, method in methods_of(owner).items():
        for node in method.each(ast.Attribute):
            if is_of_self(node) and isinstance(node.ctx, ast.Store):
                found[node.attr].add(name)
    return {attribute for attribute, methods in found.items() if methods == {"__init__"}}


def _leaves_out(scope: Scope, flags: Collection[str]) -> bool:
    """Whether a function may drop an item, because of what it is, or because it cannot be read.

    A condition on the length of a list that the function fills only closes a batch; one on the rank, or on a flag that
    the object was given, decides alike for all of its items.
    """
    filling = [*scope.calls(FILLING)]
    filled = {name_of(call.func.value) for call in filling if isinstance(call.func, ast.Attribute)}
    yields = [node for node in scope.nodes if isinstance(node, YIELDS)]
    lines = {node.lineno for node in (*filling, *yields)}
    branches = {one for line in lines for one in scope.branches_around(line) if one.on in SELECTING}
    selects = any(one.on is not Decides.RANK and not _is_no_choice(one.test, filled, flags) for one in branches)
    loops = (one for one in scope.each(ast.While) if not isinstance(one.test, ast.Constant))
    ends = any("len(" not in ast.unparse(one.test) or isinstance(one.test, ast.BoolOp) for one in loops)
    tries = any(True for _ in scope.each(ast.Try))
    chosen = any(isinstance(one, ast.IfExp) for node in yields for one in ast.walk(node))
    filtered = any(one.ifs for one in scope.each(ast.comprehension))
    taken = any(
        (takes(call) and not _is_share(call, scope)) or name_of(call.func) == "super" for call in scope.each(ast.Call)
    )
    return selects or ends or tries or chosen or filtered or taken


def _is_no_choice(test: str, filled: Collection[str], flags: Collection[str]) -> bool:
    length, flag = _LENGTH.match(test), _FLAG.match(test)
    return (length is not None and length[1] in filled) or (flag is not None and flag[1] in flags)


def _is_share(node: ast.expr, scope: Scope) -> bool:
    """Whether an expression takes every n-th item for a rank, or its range of them."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        # A part of each sample is another split, as for context parallelism.
        if any(node is part for one in scope.each(ast.Yield) for part in ast.walk(one)):
            return False
        lower, upper, step = node.slice.lower, node.slice.upper, node.slice.step
        targets = (one.target for one in scope.each(ast.For))
        items = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        is_bounded = lower is not None and (step or upper) is not None
        return is_bounded and name_of(node.value) not in items and _is_of_rank(lower, scope)
    if isinstance(node, ast.Call) and name_of(node.func) == "islice" and len(node.args) > _BOUNDS:
        return _is_of_rank(node.args[1], scope)
    return isinstance(node, ast.Compare) and _is_turn(node, scope)


def _is_turn(test: ast.Compare, scope: Scope) -> bool:
    """Whether it is the condition under which a rank keeps, or passes over, the item with this number."""
    sides = [test.left, *test.comparators]
    counted = [one for one in sides if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)]
    others = [one for one in sides if one not in counted]
    if len(counted) != 1 or len(others) != 1 or not _is_of_rank(others[0], scope):
        return False
    guarded = (node for one in scope.each(ast.If) if one.test is test for part in one.body for node in ast.walk(part))
    return any(isinstance(node, (*YIELDS, ast.Continue)) or _fills(node) for node in guarded)


def _fills(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) in FILLING


def _is_of_rank(value: ast.expr | None, scope: Scope) -> bool:
    """Whether an expression, or a variable in it, is about the rank."""
    if value is None:
        return False
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    given = (one.value for one in scope.each(ast.Assign) for target in one.targets if name_of(target) in names)
    return any(RANK_WORDS.search(ast.unparse(one)) for one in (value, *given))
