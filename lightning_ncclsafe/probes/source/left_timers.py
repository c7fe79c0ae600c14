"""Where a function returns while a timer runs that it has set, although it cancels the timer on a later line.

Where it cannot be seen that nothing else cancels the timer, nothing is found.
"""

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_ncclsafe.probes.source.syntax import (
    FUNCTIONS,
    LOOPS,
    TRY_STATEMENTS,
    Function,
    is_of_self,
    is_zero,
    name_of,
    nodes_in,
    statements_in,
)

_Test = Callable[[ast.Call], bool]
_LEAVING = ("__exit__", "__aexit__", "__del__")
_NOT_CERTAIN = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.comprehension)


class TimerHelpers(NamedTuple):
    """Functions that set a timer without cancelling it, and functions that cancel it.

    Attributes:
        module: The last part of their module's name.
        setting: Names of the former.
        cancelling: Names of the latter.
        classes: The classes whose methods they are; none for functions.
    """

    module: str
    setting: frozenset[str] = frozenset()
    cancelling: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()


def helpers_in(tree: ast.Module, module: str, sets: _Test, cancels: _Test) -> TimerHelpers:
    """The helpers of a file; none that set the timer if some are methods and others are not.

    Args:
        tree: The file.
        module: The last part of its module's name.
        sets: Whether a call sets the timer.
        cancels: Whether a call cancels it.
    """
    setting, cancelling, classes = set[str](), set[str](), set[str]()
    kinds = (node for node in statements_in(tree.body) if isinstance(node, ast.ClassDef))
    class_of = {one: kind.name for kind in kinds for one in kind.body}
    for function in _functions(tree):
        calls = [*_calls_in(function.body)]
        if any(map(cancels, calls)):
            cancelling.add(function.name)
        elif any(map(sets, calls)):
            setting.add(function.name)
            classes.add(class_of.get(function, ""))
    # An object that cancels it when its block is left may be used for that.
    leaving = (one for one in _functions(tree) if one.name in _LEAVING)
    is_closed = any(
        name_of(call.func) in cancelling or cancels(call) for one in leaving for call in _calls_in(one.body)
    )
    if is_closed or ("" in classes and len(classes) > 1):
        setting, classes = set(), set()
    return TimerHelpers(module, frozenset(setting), frozenset(cancelling), frozenset(classes - {""}))


def returns_in(tree: ast.Module, sets: _Test, cancels: _Test, helpers: TimerHelpers) -> Iterator[tuple[int, str]]:
    """Line and function of each ``return`` between these calls, in the file that sets the timer itself."""
    yield from _returns(tree, lambda function: (sets, cancels), cancels, helpers)


def returns_with(tree: ast.Module, helpers: TimerHelpers, *, is_own: bool) -> Iterator[tuple[int, str]]:
    """The same between calls of the helpers.

    Args:
        tree: The file.
        helpers: The helpers.
        is_own: Whether it is their own file.
    """
    known = _imported_from(tree, helpers)
    owners = known | helpers.classes if is_own else known
    functions = known | helpers.setting | helpers.cancelling if is_own else known

    def tests_in(function: Function) -> tuple[_Test, _Test]:
        objects = _made_in(function, tree, owners) if helpers.classes else known

        def is_of_them(call: ast.Call) -> bool:
            if isinstance(call.func, ast.Name):
                return not helpers.classes and call.func.id in functions
            of = call.func.value if isinstance(call.func, ast.Attribute) else None
            return (isinstance(of, ast.Name) or is_of_self(of)) and ast.unparse(of) in objects

        return (
            lambda call: name_of(call.func) in helpers.setting and is_of_them(call),
            lambda call: name_of(call.func) in helpers.cancelling and is_of_them(call),
        )

    yield from _returns(tree, tests_in, lambda call: False, helpers)


def _returns(
    tree: ast.Module,
    tests_in: Callable[[Function], tuple[_Test, _Test]],
    cancels: _Test,
    helpers: TimerHelpers,
) -> Iterator[tuple[int, str]]:
    def may_cancel(call: ast.Call) -> bool:
        is_set_to_0 = name_of(call.func) in helpers.setting and any(map(is_zero, call.args))
        return cancels(call) or name_of(call.func) in helpers.cancelling or is_set_to_0

    functions = [*_functions(tree)]
    if _is_cancelled_around(tree, functions, may_cancel, helpers):
        return
    cancelling = (one for one in functions if _cancels_in(one, may_cancel))
    callees = {name_of(call.func) for one in cancelling for call in _calls_in(one.body)}
    for function in functions:
        sets, does_cancel = tests_in(function)
        last = max((call.lineno for call in _calls_in(function.body) if does_cancel(call)), default=0)
        walk = _Walk(sets, may_cancel)
        walk.block(function.body, is_set=False)
        # Who calls it may cancel the timer afterwards.
        if function.name not in callees:
            yield from ((line, function.name) for line in walk.returns if line < last)


def _cancels_in(function: Function, cancels: _Test) -> bool:
    return any(map(cancels, _calls_in(function.body)))


def _is_cancelled_around(tree: ast.Module, functions: list[Function], cancels: _Test, helpers: TimerHelpers) -> bool:
    """Whether something in a file may cancel the timer when a function is left: ``finally``, ``with``, a callback."""
    tries = (node for node in statements_in(tree.body) if isinstance(node, TRY_STATEMENTS))
    in_finally = any(cancels(call) for one in tries for call in _calls_in(one.finalbody))
    in_exit = any(one.name in _LEAVING and _cancels_in(one, cancels) for one in functions)
    called = {id(call.func) for call in ast.walk(tree) if isinstance(call, ast.Call)}
    names = (node for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in called)
    return in_finally or in_exit or any(name_of(one) in {*helpers.cancelling, "alarm", "setitimer"} for one in names)


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (one for one in statements_in(tree.body) if isinstance(one, FUNCTIONS))


def _imported_from(tree: ast.Module, helpers: TimerHelpers) -> set[str]:
    """The names under which a file has the helpers, their classes or their module."""
    found = set[str]()
    for node in statements_in(tree.body):
        if isinstance(node, ast.ImportFrom):
            is_theirs = (node.module or "").rpartition(".")[2] == helpers.module
            theirs = helpers.classes or helpers.setting | helpers.cancelling
            wanted = theirs if is_theirs else {helpers.module}
            # Under another name it is not recognized.
            found |= {alias.name for alias in node.names if alias.name in wanted and not alias.asname}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name == helpers.module and not alias.asname}
    return found


def _made_in(function: Function, tree: ast.Module, classes: Iterable[str]) -> set[str]:
    """Names in a function, and attributes of ``self`` in the file, that are only given objects of these classes."""
    given: dict[str, set[str]] = {}
    own = (node for node in nodes_in(function.body) if isinstance(node, ast.Assign))
    every = (node for node in statements_in(tree.body) if isinstance(node, ast.Assign))
    names = ((target, node.value) for node in own for target in node.targets if isinstance(target, ast.Name))
    attributes = ((target, node.value) for node in every for target in node.targets if is_of_self(target))
    for target, value in itertools.chain(names, attributes):
        kind = name_of(value.func) if isinstance(value, ast.Call) else ""
        given.setdefault(ast.unparse(target), set()).add(kind)
    return {name for name, kinds in given.items() if kinds <= {*classes}}


def _calls_in(block: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in nodes_in(block) if isinstance(node, ast.Call))


def _certain_calls_in(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Those that are made whenever the statements are."""
    left = [*nodes]
    while left:
        node = left.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, _NOT_CERTAIN):
            left += ast.iter_child_nodes(node)


class _Walk:
    """Goes through the statements of a function, each once.

    Attributes:
        returns: The lines at which it returns while the timer is certain to run.
    """

    def __init__(self, sets: _Test, cancels: _Test) -> None:
        self._sets, self._cancels = sets, cancels
        self.returns: list[int] = []

    def block(self, statements: list[ast.stmt], *, is_set: bool) -> bool | None:
        """Whether the timer is certain to run after these; None if they are never left at their end."""
        after: bool | None = is_set
        for one in statements:
            after = self._statement(one, is_set=bool(after))
            if after is None:
                break
        return after

    def _statement(self, one: ast.stmt, *, is_set: bool) -> bool | None:
        if isinstance(one, (ast.Raise, ast.Continue, ast.Break)):
            return None
        if isinstance(one, ast.Return):
            self.returns += [one.lineno] if self._after([one], is_set=is_set) else []
            return None
        if isinstance(one, TRY_STATEMENTS):
            return self._try(one, is_set=is_set)
        if isinstance(one, (ast.With, ast.AsyncWith)):
            heads = [item.context_expr for item in one.items]
            return self.block(one.body, is_set=self._after(heads, is_set=is_set))
        if isinstance(one, (ast.If, *LOOPS)):
            head = one.iter if isinstance(one, (ast.For, ast.AsyncFor)) else one.test
            is_set = self._after([head], is_set=is_set)
            ends = self.block(one.body, is_set=is_set), self.block(one.orelse, is_set=is_set)
            if isinstance(one, ast.If):
                return _both(*ends)
            # A loop may be left anywhere, and after no pass at all.
            return is_set and not any(map(self._cancels, _calls_in([one])))
        return False if isinstance(one, ast.Match) else self._after([one], is_set=is_set)

    def _try(self, one: ast.Try, *, is_set: bool) -> bool | None:
        after = self.block([*one.body, *one.orelse], is_set=is_set)
        # Where something is caught, a timer may have gone off.
        for handler in one.handlers:
            after = _both(after, self.block(handler.body, is_set=False))
        return None if after is None else self.block(one.finalbody, is_set=after)

    def _after(self, nodes: Sequence[ast.AST], *, is_set: bool) -> bool:
        if isinstance(nodes[0] if nodes else None, (*FUNCTIONS, ast.ClassDef)):
            return is_set
        is_cancelled = any(map(self._cancels, _calls_in(nodes)))
        return not is_cancelled and (is_set or any(map(self._sets, _certain_calls_in(nodes))))


def _both(one: bool | None, other: bool | None) -> bool | None:
    """What is certain after one of two blocks; None if neither is left at its end."""
    known = [after for after in (one, other) if after is not None]
    return all(known) if known else None
