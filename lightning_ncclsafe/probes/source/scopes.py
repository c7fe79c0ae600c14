"""The user's functions as source: what they call and set, and what decides whether a line of theirs is reached.

It reads source files, so it is not for the training's thread.
"""

import ast
import inspect
import itertools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import CodeType, ModuleType
from typing import Any, NamedTuple, TypeVar

from lightning_ncclsafe.code.libraries import is_top_level
from lightning_ncclsafe.facts import Branch, Decides
from lightning_ncclsafe.probes.process.stacks import is_user_code
from lightning_ncclsafe.probes.source.control_flow import control_flow
from lightning_ncclsafe.probes.source.syntax import (
    BLOCKS,
    COMPREHENSIONS,
    FUNCTIONS,
    LOOPS,
    Function,
    file_of,
    first_line,
    last_line,
    name_of,
    nodes_in,
    syntax_tree,
)

N = TypeVar("N", bound=ast.AST)

MOST_PLACES = 8
"""The most lines that are reported of one kind."""
SELECTING = (Decides.RANK, Decides.VALUE, Decides.EXCEPTION)
"""What the branches depend on that some ranks may take and others not, other than how often a loop runs."""
_CONDITIONS = (Decides.RANK, Decides.VALUE, Decides.COMMON)
_MODULE = "<module>"
# Of itertools.
_ENDLESS = ("count", "cycle")


@dataclass(frozen=True)
class Scope:
    """A function of the user's, or the statements of a file outside of its functions.

    Attributes:
        file: Path of the file; empty for a function that is not the user's, of which nothing is known.
        name: Its name; ``"<module>"`` for a file.
        line: Its first line, decorators included; 1 for a file.
        body: Its statements; none if its source cannot be read.
        parameters: Names of its parameters, in the order of positions.
        collected: Names of its ``*args`` and ``**kwargs``.
        outer: The function that it is in, or the file; None for a file.
    """

    file: str = ""
    name: str = ""
    line: int = 0
    body: tuple[ast.stmt, ...] = field(default=(), compare=False, repr=False)
    parameters: tuple[str, ...] = field(default=(), compare=False, repr=False)
    collected: tuple[str, ...] = field(default=(), compare=False, repr=False)
    outer: "Scope | None" = field(default=None, compare=False, repr=False)

    @property
    def is_function(self) -> bool:
        """Whether it is no whole file."""
        return not is_top_level(self.name)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node in it, in the order of lines, without those of the functions and classes in it."""
        return tuple(nodes_in(self.body))

    def each(self, kind: type[N]) -> Iterator[N]:
        """Its nodes of one kind, in the order of lines."""
        return (node for node in self.nodes if isinstance(node, kind))

    def calls(self, names: Collection[str]) -> Iterator[ast.Call]:
        """Its calls of functions and methods with these names."""
        return (call for call in self.each(ast.Call) if name_of(call.func) in names)

    def calls_under_condition(self, name: str) -> tuple[str, ...]:
        """Where it calls a function of this name under a condition on the rank: ``"file:line in training_step"``."""
        lines = (call.lineno for call in self.calls([name]))
        return tuple(self.place(line) for line in lines if self.rank_condition(line))

    def sets(self, attributes: Collection[str]) -> tuple[str, ...]:
        """Where it, or a function that it defines, sets one of these attributes: ``"file:line in training_step"``."""
        nodes = (node for statement in self.body for node in ast.walk(statement))
        lines = {one.line for node in nodes for one in attributes_set(node) if one.name in attributes}
        return tuple(self.place(line) for line in sorted(lines))

    def place(self, line: int) -> str:
        """``"file:line in function"``; empty for line 0."""
        return f"{self.file}:{line} in {self.name}" if line else ""

    def passes_on(self, value: ast.expr) -> str:
        """The parameter whose value this is, as the function was given it; empty for any other expression."""
        name = value.id if isinstance(value, ast.Name) else ""
        return name if name in self.parameters and name not in self._rebound else ""

    @cached_property
    def _rebound(self) -> frozenset[str]:
        """The names that it gives another value."""
        return frozenset(name.id for name in self.each(ast.Name) if isinstance(name.ctx, ast.Store))

    def branches_around(self, line: int) -> tuple[Branch, ...]:
        """The branches that may lead around a line of it."""
        return control_flow(self.file).around(line).branches if self.file else ()

    def rank_condition(self, line: int) -> str:
        """The condition on the rank under which a line of it runs, e.g. ``"if trainer.is_global_zero:  (line 41)"``.

        An enclosing ``if`` whose test names the rank, or an earlier ``if not is_master(): return``; empty if there is
        none.
        """
        return control_flow(self.file).around(line).rank_condition if self.file else ""

    def loops_around(self, lines: Collection[int]) -> list["Loop"]:
        """Its loops that have all of these lines, at least one, from inside out."""
        around = (loop for loop in self._loops if loop.first <= min(lines) and max(lines) <= loop.last)
        return sorted(around, key=lambda loop: (-loop.first, loop.last))

    @cached_property
    def _loops(self) -> tuple["Loop", ...]:
        statements = (
            Loop(one.lineno, last_line(one.body[-1]), _ends_at(one)) for one in self.nodes if isinstance(one, LOOPS)
        )
        inline = (Loop(one.lineno, last_line(one), 0) for one in self.nodes if isinstance(one, COMPREHENSIONS))
        return (*statements, *inline)

    def leads_around(self, line: int) -> tuple[str, ...]:
        """The branches that may have led around a line: jumps before it, and conditions around it.

        ``"file:line in training_step"`` of each, in their order.
        """
        branches = self.branches_around(line)
        lines = {branch.line for branch in branches if branch.jump or branch.on in _CONDITIONS}
        return tuple(map(self.place, sorted(lines)))

    def differs_around(self, line: int) -> tuple[tuple[str, str], ...]:
        """Jumps before it in whose place the condition is to be looked at, each with the line of that."""
        branches = (branch for branch in self.branches_around(line) if branch.jump and branch.differs_at)
        return tuple((self.place(branch.line), self.place(branch.differs_at)) for branch in branches)

    def conditions_around(self, line: int) -> tuple[str, ...]:
        """The conditions among these branches; they are reported beside the line, jumps at a line of their own."""
        branches = self.branches_around(line)
        lines = {branch.line for branch in branches if not branch.jump and branch.on in _CONDITIONS}
        return tuple(map(self.place, sorted(lines)))

    def handlers_around(self, line: int) -> tuple[str, ...]:
        """The lines that handle what is raised at a line: ``except`` clauses, and those of context managers."""
        handled = (one for one in self.branches_around(line) if one.on is Decides.EXCEPTION and not one.jump)
        return tuple(branch.handled_at or self.place(branch.line) for branch in handled)


class Loop(NamedTuple):
    """A loop in a function.

    Attributes:
        first: Its first line.
        last: The last line of its body.
        ends_at: The line of the condition by which it ends: the head of a ``while``, or the outermost ``if`` around
            the only statement that leaves a loop without end. 0 if that is not known: a ``for`` or a comprehension ends
            with what it goes through.
    """

    first: int
    last: int
    ends_at: int


class AttributeSet(NamedTuple):
    """A statement that sets an attribute, or a call of ``setattr`` that does.

    Attributes:
        owner: The expression whose attribute it is.
        name: Name of the attribute.
        value: What it is set to, or changed by.
        line: The line.
    """

    owner: ast.expr
    name: str
    value: ast.expr
    line: int


def attributes_set(node: ast.AST) -> Iterator[AttributeSet]:
    """The attributes that a node sets by itself, without what is within it."""
    if isinstance(node, ast.Call) and name_of(node.func) == "setattr" and len(node.args) == 3:
        owner, name, value = node.args
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield AttributeSet(owner, name.value, value, node.lineno)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute):
                yield AttributeSet(target.value, target.attr, node.value, node.lineno)


def _ends_at(loop: ast.stmt) -> int:
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        return loop.lineno
    is_endless = isinstance(loop, ast.While) or (isinstance(loop, ast.For) and _is_endless(loop.iter))
    exits = [*_exits(loop.body, 0)] if is_endless and isinstance(loop, LOOPS) else []
    return exits[0] if len(exits) == 1 else 0


def _is_endless(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or name_of(value.func) not in _ENDLESS:
        return False
    return isinstance(value.func, ast.Name) or ast.unparse(value.func).startswith("itertools.")


def _exits(body: Iterable[ast.AST], under: int, *, of_inner: bool = False) -> Iterator[int]:
    """Of each statement that leaves a loop with this body: the line of the outermost ``if`` around it, or 0."""
    for one in body:
        if isinstance(one, (ast.Return, ast.Raise)) or (isinstance(one, ast.Break) and not of_inner):
            yield under
        elif not isinstance(one, (*FUNCTIONS, ast.ClassDef, ast.expr)):
            inside = one.lineno if isinstance(one, ast.If) and not under else under
            after = one.orelse if isinstance(one, LOOPS) else []
            within = (node for node in ast.iter_child_nodes(one) if node not in after)
            yield from _exits(within, inside, of_inner=of_inner or isinstance(one, LOOPS))
            yield from _exits(after, inside, of_inner=of_inner)


@lru_cache(maxsize=8)
def scopes_of(file: str) -> tuple[Scope, ...]:
    """A file itself, and all functions in it, methods and inner ones too; those that contain others come first."""
    tree = syntax_tree(file)
    whole = Scope(file, _MODULE, 1, tuple(tree.body))
    found = [whole]
    left: deque[tuple[ast.AST, Scope]] = deque([(tree, whole)])
    while left:
        node, scope = left.popleft()
        if isinstance(node, FUNCTIONS):
            scope = _function(file, node, scope)
            found.append(scope)
        left += ((child, scope) for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS))
    return tuple(found)


def scope_at(file: str, function: str, line: int) -> Scope:
    """The function of this name that a line is in, the innermost of several; one without source if there is none."""
    known = [scope for scope in scopes_of(file) if scope.name == function]
    around = (scope for scope in known if not scope.is_function or _has_line(scope, line))
    return max(around, key=lambda scope: scope.line, default=Scope())


def _has_line(scope: Scope, line: int) -> bool:
    return bool(scope.body) and scope.line <= line <= last_line(scope.body[-1])


def _function(file: str, node: Function, outer: Scope) -> Scope:
    given = node.args
    parameters = tuple(one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    collected = tuple(one.arg for one in (given.vararg, given.kwarg) if one is not None)
    return Scope(file, node.name, first_line(node), tuple(node.body), parameters, collected, outer)


def scope_of(function: Callable[..., Any] | CodeType | None) -> Scope:
    """The source of a function, a method or the code of one; what decorators return is the function that they wrap."""
    code = function if isinstance(function, CodeType) else _code_of(function)
    if code is None or not is_user_code(code.co_filename):
        return Scope()
    # The first line of code with decorators is that of the first of them.
    line = code.co_firstlineno if not is_top_level(code.co_name) else 1
    known = (scope for scope in scopes_of(code.co_filename) if (scope.name, scope.line) == (code.co_name, line))
    return next(known, Scope(code.co_filename, code.co_name, line))


def _code_of(function: Callable[..., Any] | None) -> CodeType | None:
    return getattr(inspect.unwrap(function), "__code__", None) if function is not None else None


def user_modules() -> list[ModuleType]:
    """The loaded modules of the user's code, in the order in which they were loaded."""
    modules = ((module, file_of(module)) for module in [*sys.modules.values()])
    return [module for module, file in modules if file and is_user_code(file)]


def user_files() -> list[str]:
    """The files of these modules, each once: the program may be loaded under several names."""
    return [*dict.fromkeys(map(file_of, user_modules()))]


def scopes_in(owners: Iterable[Any]) -> Iterator[Scope]:
    """The user's functions in the classes of these objects and their bases, of each class once."""
    kinds = (kind for owner in owners if owner is not None for kind in type(owner).__mro__)
    return itertools.chain.from_iterable(map(methods_in, dict.fromkeys(kinds)))


def methods_in(kind: type) -> Iterator[Scope]:
    """The user's functions in a class, without those of its bases."""
    members = [*vars(kind).values()]  # at once: the program may add to its class while files are read
    scopes = (scope_of(function) for function in map(function_in, members) if inspect.isfunction(function))
    return (scope for scope in scopes if scope.file)


def function_in(member: Any) -> Any:
    """The function behind a property, a static or a class method; any other member of a class as it is."""
    return member.__func__ if isinstance(member, (classmethod, staticmethod)) else getter_or_self(member)


def getter_or_self(member: Any) -> Any:
    """The function behind a property; any other member of a class as it is, without asking it for attributes."""
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, cached_property) else member


def places_in(owners: Iterable[Any], asked: Callable[[Scope], Iterable[str]]) -> tuple[str, ...]:
    """Lines in the user's functions of these objects, the first few."""
    return first_places(place for scope in scopes_in(owners) for place in asked(scope))


def first_places(places: Iterable[str]) -> tuple[str, ...]:
    """The first few of these places, each once."""
    return tuple(itertools.islice(dict.fromkeys(places), MOST_PLACES))
