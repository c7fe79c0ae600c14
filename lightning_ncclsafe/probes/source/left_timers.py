"""Where a function returns while a timer still runs that it has set, and cancels on its other ways out."""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_ncclsafe.probes.source.syntax import (
    FUNCTIONS,
    LOOPS,
    TRY_STATEMENTS,
    Function,
    is_of_self,
    name_of,
    nodes_in,
    statements_in,
)

_Test = Callable[[ast.Call], bool]


class TimerHelpers(NamedTuple):
    """The functions of a file that only set its timer, and those that only cancel it.

    Attributes:
        setting: Their names.
        cancelling: Their names.
        classes: The classes whose methods they are; none for functions.
    """

    setting: frozenset[str] = frozenset()
    cancelling: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()

    @property
    def imported(self) -> frozenset[str]:
        """The names of which another file has one if it uses these."""
        return self.classes or self.setting


def helpers_in(tree: ast.Module, sets: _Test, cancels: _Test) -> TimerHelpers:
    """The helpers of a file; none if some are methods and others are not.

    Args:
        tree: The file that sets the timer.
        sets: Whether a call sets it.
        cancels: Whether a call cancels it.
    """
    setting, cancelling, classes = set[str](), set[str](), set[str]()
    kinds = (node for node in statements_in(tree.body) if isinstance(node, ast.ClassDef))
    class_of = {one: kind.name for kind in kinds for one in kind.body}
    for function in _functions(tree):
        calls = [*_calls_in(function.body)]
        does_set, does_cancel = any(map(sets, calls)), any(map(cancels, calls))
        if does_set is not does_cancel:
            (setting if does_set else cancelling).add(function.name)
            classes.add(class_of.get(function, ""))
    if not setting or not cancelling or ("" in classes and len(classes) > 1):
        return TimerHelpers()
    return TimerHelpers(frozenset(setting), frozenset(cancelling), frozenset(classes - {""}))


def returns_in(tree: ast.Module, sets: _Test, cancels: _Test, cancelling: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and function of each ``return`` before which these calls have set a timer, and after which they cancel it.

    None in a file in which a ``finally`` cancels it, which may be around a call of the function, or that hands one of
    the cancelling functions, by these names, to something else, such as ``ExitStack.callback``. An exception is not
    looked at: who catches it may cancel the timer.
    """
    called = {id(call.func) for call in ast.walk(tree) if isinstance(call, ast.Call)}
    names = (node for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in called)
    if any(name_of(one) in cancelling for one in names):
        return
    tries = (node for node in statements_in(tree.body) if isinstance(node, TRY_STATEMENTS))
    if any(cancels(call) for one in tries for call in _calls_in(one.finalbody)):
        return
    for function in _functions(tree):
        last = max((call.lineno for call in _calls_in(function.body) if cancels(call)), default=0)
        walk = _Walk(sets, cancels)
        walk.block(function.body, is_set=False)
        yield from ((line, function.name) for line in walk.returns if line < last)


def returns_with(tree: ast.Module, helpers: TimerHelpers) -> Iterator[tuple[int, str]]:
    """The same for calls of these helpers, in any file."""
    owners = _made_in(tree, helpers.classes) if helpers.classes else _imported_in(tree)
    known = owners | {one.name for one in _functions(tree)}

    def is_call_of(call: ast.Call, functions: frozenset[str]) -> bool:
        if name_of(call.func) not in functions:
            return False
        if isinstance(call.func, ast.Name):
            return not helpers.classes and call.func.id in known
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        return (isinstance(of, ast.Name) or is_of_self(of)) and name_of(of) in owners

    yield from returns_in(
        tree,
        lambda call: is_call_of(call, helpers.setting),
        lambda call: is_call_of(call, helpers.cancelling),
        helpers.cancelling,
    )


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (one for one in statements_in(tree.body) if isinstance(one, FUNCTIONS))


def _made_in(tree: ast.Module, classes: frozenset[str]) -> set[str]:
    """Names and attributes that are given an object of these classes."""
    given = (one for one in statements_in(tree.body) if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call))
    made = (one for one in given if isinstance(one.value, ast.Call) and name_of(one.value.func) in classes)
    return {name_of(target) for one in made for target in one.targets}


def _imported_in(tree: ast.Module) -> set[str]:
    imports = (one for one in statements_in(tree.body) if isinstance(one, (ast.Import, ast.ImportFrom)))
    return {alias.asname or alias.name for one in imports for alias in one.names}


def _calls_in(block: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in nodes_in(block) if isinstance(node, ast.Call))


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
            inside = self.block(one.body, is_set=is_set)
            # What a loop may have done in its last pass, it may have left out as well.
            return _both(inside, self.block(one.orelse, is_set=is_set))
        return False if isinstance(one, ast.Match) else self._after([one], is_set=is_set)

    def _try(self, one: ast.Try, *, is_set: bool) -> bool | None:
        after = self.block([*one.body, *one.orelse], is_set=is_set)
        # Where something is caught, a timer may have gone off.
        for handler in one.handlers:
            after = _both(after, self.block(handler.body, is_set=False))
        return None if after is None else self.block(one.finalbody, is_set=after)

    def _after(self, nodes: Sequence[ast.AST], *, is_set: bool) -> bool:
        calls = [*_calls_in(nodes)]
        return not any(map(self._cancels, calls)) and (is_set or any(map(self._sets, calls)))


def _both(one: bool | None, other: bool | None) -> bool | None:
    """What is certain after one of two blocks; None if neither is left at its end."""
    known = [after for after in (one, other) if after is not None]
    return all(known) if known else None
