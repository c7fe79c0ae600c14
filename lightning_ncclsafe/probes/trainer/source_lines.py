"""Lines in the source of the user's hooks: where one returns nothing, logs a key, or ends the loop."""

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType
from typing import Any, TypeGuard, TypeVar

from lightning_ncclsafe.facts import Branch, Decides
from lightning_ncclsafe.probes.process.stacks import is_user_code
from lightning_ncclsafe.probes.source.control_flow import control_flow, rank_condition
from lightning_ncclsafe.probes.source.syntax import (
    COMPREHENSIONS,
    FUNCTIONS,
    function_of,
    functions_in,
    is_of_self,
    name_of,
)

N = TypeVar("N", bound=ast.AST)

BEFORE_TRAINING = {"__init__", "configure_model", "configure_optimizers", "prepare_data", "setup"}
"""What Lightning calls before the first batch."""
_CONDITIONS = (Decides.RANK, Decides.VALUE, Decides.COMMON)
_GRADIENT_MODES = {"no_grad", "inference_mode", "set_grad_enabled"}
# From what a part of the model returns to the loss.
_MOST_VARIABLES = 4
MOST_LINES = 8
"""The most lines that are reported of one kind."""


class HookSource:
    """The source of one hook; empty if it cannot be read, or is not the user's.

    Args:
        hook: The method, or the code of a function. Its source file is read, so not on the training's thread.
    """

    def __init__(self, hook: Callable[..., Any] | CodeType | None) -> None:
        self.file, self.name = "", ""
        self._body: list[ast.stmt] = []
        code = hook if isinstance(hook, CodeType) else getattr(inspect.unwrap(hook), "__code__", None) if hook else None
        if code is not None and is_user_code(code.co_filename):
            self.file, self.name = code.co_filename, code.co_name
            function = function_of(code)
            self._body = function.body if function is not None else []

    def _each(self, kind: type[N]) -> Iterator[N]:
        """Its nodes of one kind, in the order of their lines."""
        return (node for node in inside(self._body) if isinstance(node, kind))

    def _logging_calls(self) -> Iterator[ast.Call]:
        """The calls of a method ``log`` or ``log_dict``."""
        for call in self._each(ast.Call):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("log", "log_dict"):
                yield call

    def returns_nothing(self) -> tuple[str, ...]:
        """Where it returns ``None``: ``"file:line in training_step"``."""
        returns = self._each(ast.Return)
        return tuple(self.place(one.lineno) for one in returns if one.value is None or _is_constant(one.value, None))

    def logs(self, key: str) -> int:
        """The line of the call of ``log`` or ``log_dict`` with a key as a literal; 0 if there is none."""
        literals = ((node, call.lineno) for call in self._logging_calls() for node in ast.walk(call))
        return next((line for node, line in literals if isinstance(node, ast.Constant) and node.value == key), 0)

    def may_log(self, key: str) -> tuple[int, ...]:
        """The lines of such calls with a computed key that may be this one."""
        calls = self._logging_calls()
        return tuple(call.lineno for call in calls if any(_may_be(name, key) for name in _names_given(call)))

    def reduced_keys(self) -> tuple[tuple[str, int], ...]:
        """Literal keys in calls of ``log`` or ``log_dict`` with ``sync_dist=True``, and their lines."""
        reduced = [call for call in self._logging_calls() if any(map(_is_reduced, call.keywords))]
        given = ((name, call.lineno) for call in reduced for name in _names_given(call))
        return tuple((str(name.value), line) for name, line in given if isinstance(name, ast.Constant))

    def uses(self, attribute: str) -> int:
        """The first line that calls or names ``self.attribute``, or calls one of those in it; 0 if there is none."""
        named = self._named(attribute)
        return next(self._calls_of_each(named), 0) or next((node.lineno for node in named), 0)

    def calls(self, attribute: str) -> bool:
        """Whether it calls ``self.attribute``, or one of those in it, and does not only name it, as ``len`` does."""
        named = self._named(attribute)
        called = (call.func for call in self._each(ast.Call))
        callees = (callee.value if isinstance(callee, ast.Subscript) else callee for callee in called)
        return any(callee in named for callee in callees) or any(self._calls_of_each(named))

    def _named(self, attribute: str) -> list[ast.Attribute]:
        named = (node for node in self._each(ast.Attribute) if node.attr == attribute)
        return [node for node in named if isinstance(node.value, ast.Name)]

    def _calls_of_each(self, named: list[ast.Attribute]) -> Iterator[int]:
        """The lines that call what loops and comprehensions take from these."""
        loops = [(loop.target, loop.iter, [*inside(loop.body)]) for loop in self._each(ast.For)]
        for made in self._each(ast.expr):
            parts = made.generators if isinstance(made, COMPREHENSIONS) else []
            loops += [(part.target, part.iter, [*ast.walk(made)]) for part in parts]
        for target, taken_from, body in loops:
            if any(node in named for node in ast.walk(taken_from)):
                names = _names_in(target)
                calls = (node for node in body if isinstance(node, ast.Call))
                yield from (call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id in names)

    def uses_of_output(self, line: int, attribute: str) -> int:
        """The first line that uses what ``self.attribute`` returned on a line, if the same branches lead around all.

        Variables that are computed from it are followed, a few times. 0 if a use is certain, or none is known.
        """
        assigned = {node.lineno: node for node in self._each(ast.Assign)}
        made = (node for node in assigned.values() if node.lineno <= line <= (node.end_lineno or 0))
        names = {name for node in made for name in _names_made_from(node, attribute)}
        for _ in range(_MOST_VARIABLES):
            read = (node for node in self._each(ast.Name) if node.id in names and isinstance(node.ctx, ast.Load))
            lines = sorted({node.lineno for node in read if node.lineno > line})
            branches = {self.leads_around(one) for one in lines}
            if not lines or () not in branches:
                return lines[0] if len(branches) == 1 else 0
            certain = [one for one in lines if not self.leads_around(one)]
            if not assigned.keys() >= {*certain}:
                return 0
            names = {name for one in certain for target in assigned[one].targets for name in _names_in(target)}
            line = certain[0]
        return 0

    def switches_gradients_off(self, line: int) -> int:
        """The line of the innermost ``with`` around a line that may switch gradients off; 0 if there is none."""
        around = (block for block in self._each(ast.With) if block.lineno < line <= (block.end_lineno or 0))
        return max((block.lineno for block in around if any(map(_is_gradient_mode, block.items))), default=0)

    def leads_around(self, line: int) -> tuple[str, ...]:
        """The branches that may have led around a line: jumps before it, and conditions around it.

        ``"file:line in training_step"`` of each, in their order.
        """
        lines = {branch.line for branch in self._branches(line) if branch.jump or branch.on in _CONDITIONS}
        return tuple(map(self.place, sorted(lines)))

    def conditions_around(self, line: int) -> tuple[str, ...]:
        """The conditions among these branches; they are reported beside the line, jumps at a line of their own."""
        lines = {branch.line for branch in self._branches(line) if not branch.jump and branch.on in _CONDITIONS}
        return tuple(map(self.place, sorted(lines)))

    def _branches(self, line: int) -> tuple[Branch, ...]:
        return control_flow(self.file).around(line).branches if self.file else ()

    def freezes(self) -> tuple[str, ...]:
        """Where it may set ``requires_grad`` to false during training."""
        return self._while_training(_freezes)

    def makes_leaves(self) -> tuple[str, ...]:
        """Where it makes a tensor that is computed from no parameter require a gradient."""
        return self._while_training(_makes_leaf)

    def _while_training(self, wanted: Callable[[ast.AST], bool]) -> tuple[str, ...]:
        if self.name in BEFORE_TRAINING:
            return ()
        lines = (getattr(node, "lineno", 0) for node in inside(self._body) if wanted(node))
        return tuple(map(self.place, dict.fromkeys(lines)))

    def calls_under_condition(self, name: str) -> tuple[str, ...]:
        """Where it calls a function of this name under a condition on the rank: ``"file:line in training_step"``."""
        lines = (call.lineno for call in self._each(ast.Call) if name_of(call.func) == name)
        return tuple(self.place(line) for line in lines if rank_condition(self.file, line))

    def calls_any(self, names: Collection[str]) -> tuple[str, ...]:
        """Where it calls a function of one of these names: ``"file:line in training_step"``."""
        return tuple(self.place(call.lineno) for call in self._each(ast.Call) if name_of(call.func) in names)

    def calls_on(self, owner: str, method: str) -> tuple[int, ...]:
        """The lines that call a method of ``self`` or, with ``owner="super"``, of the classes behind this one's."""
        calls = ((call.lineno, call.func) for call in self._each(ast.Call))
        called = ((line, ast.unparse(func)) for line, func in calls if name_of(func) == method)
        return tuple(line for line, whole in called if re.match(rf"{owner}(\(.*\))?\.{method}$", whole))

    def lines_that_step(self) -> tuple[int, ...]:
        """The lines that call the ``step`` of an optimizer, by its name: a scheduler has one, too."""
        steps = (call for call in self._each(ast.Call) if name_of(call.func) == "step")
        return tuple(call.lineno for call in steps if "opt" in ast.unparse(call.func).lower())

    def sets(self, attributes: Iterable[str]) -> tuple[str, ...]:
        """Where it, or a function that it defines, sets one of these attributes: ``"file:line in training_step"``."""
        names = {*attributes}
        lines = [node.lineno for body in self._body for node in ast.walk(body) if _sets(node, names)]
        return tuple(map(self.place, sorted(lines)))

    def may_end_iteration(self) -> tuple[str, ...]:
        """Where a ``StopIteration`` may leave it: it is raised, or ``next()`` is called without a default.

        Lightning raises one itself where ``on_train_batch_start`` returns -1.
        """
        ends: list[ast.Raise | ast.Call] = [*self._each(ast.Raise), *self._each(ast.Call)]
        lines = [node.lineno for node in ends if _ends_iteration(node)]
        if self.name == "on_train_batch_start":
            returns = (node for node in self._each(ast.Return) if node.value is not None)
            lines += [node.lineno for node in returns if ast.unparse(node) == "return -1"]
        return tuple(map(self.place, sorted(lines)))

    def place(self, line: int) -> str:
        """``"file:line in hook"``; empty for line 0."""
        return f"{self.file}:{line} in {self.name}" if line else ""


def source_of(module: Any, hook: str) -> HookSource:
    """The source of a hook in a module's class: while a strategy runs a step, the instance has another ``forward``."""
    return HookSource(getattr(type(module), hook, None))


def sources_of(module: Any, hook: str) -> Iterator[HookSource]:
    """The same, and those of the decorators around it, which may return in its place."""
    yield source_of(module, hook)
    function = getattr(type(module), hook, None)
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield HookSource(getattr(function, "__code__", None))
        function = wrapped


def sources_in(owners: Iterable[Any]) -> Iterator[HookSource]:
    """The sources of the user's functions in the classes of these objects and their bases, of each class once."""
    for kind in dict.fromkeys(kind for owner in owners if owner is not None for kind in type(owner).__mro__):
        functions = [function for function in vars(kind).values() if inspect.isfunction(function)]
        if any(is_user_code(inspect.unwrap(function).__code__.co_filename) for function in functions):
            yield from map(HookSource, functions)


def lines_in(owners: Iterable[Any], asked: Callable[[HookSource], tuple[str, ...]]) -> tuple[str, ...]:
    """Lines in the user's functions of these objects, the first few."""
    return first_places(line for source in sources_in(owners) for line in asked(source))


def first_places(places: Iterable[str]) -> tuple[str, ...]:
    """The first few of these places, each once."""
    return tuple(itertools.islice(dict.fromkeys(places), MOST_LINES))


def lines_that_set(attributes: Iterable[str], file: str) -> tuple[str, ...]:
    """Lines in any file that set one of these attributes."""
    names = {*attributes}
    found = ((node, function) for function in functions_in(file) for node in inside(function.body))
    return tuple(f"{file}:{node.lineno} in {function.name}" for node, function in found if _sets(node, names))


def inside(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node of a function in the order of its lines, except in functions defined within it."""
    for statement in body:
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        yield statement
        for child in ast.iter_child_nodes(statement):
            yield from inside([child])  # type: ignore[list-item]


def _names_in(target: ast.expr) -> set[str]:
    """The variables that are assigned; not those whose attributes or items are."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _names_made_from(node: ast.Assign, attribute: str) -> Iterator[str]:
    """The variables that a statement assigns what it computes from an attribute of ``self``."""
    pairs = [(target, node.value) for target in node.targets]
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = [*zip(target.elts, node.value.elts, strict=False)]
    for target, value in pairs:
        if any(is_of_self(part) and part.attr == attribute for part in ast.walk(value)):
            yield from _names_in(target)


def _is_attribute(target: ast.expr, names: set[str]) -> bool:
    return isinstance(target, ast.Attribute) and target.attr in names


def _is_gradient_mode(item: ast.withitem) -> bool:
    parts = (node for node in ast.walk(item.context_expr) if isinstance(node, ast.expr))
    return any(name_of(node) in _GRADIENT_MODES for node in parts)


def _sets(node: ast.AST, names: set[str]) -> TypeGuard[ast.stmt | ast.Call]:
    if isinstance(node, ast.Call):
        constants = (value.value for value in node.args if isinstance(value, ast.Constant))
        return name_of(node.func) == "setattr" and not names.isdisjoint(constants)
    if isinstance(node, ast.Assign):
        return any(_is_attribute(target, names) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.AnnAssign)) and _is_attribute(node.target, names)


def _is_constant(node: ast.expr, value: bool | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_reduced(keyword: ast.keyword) -> bool:
    return keyword.arg == "sync_dist" and _is_constant(keyword.value, True)


def _freezes(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        is_set = any(_is_attribute(target, {"requires_grad"}) for target in node.targets)
        return is_set and not _is_constant(node.value, True)
    if not isinstance(node, ast.Call):
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    is_set = name_of(node.func) == "requires_grad_" and bool(given) and not _is_constant(given[0], True)
    return is_set or name_of(node.func) == "freeze"


def _makes_leaf(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if name_of(node.func) == "requires_grad_":
        return not any(_is_constant(value, False) for value in node.args)
    return any(keyword.arg == "requires_grad" and not _is_constant(keyword.value, False) for keyword in node.keywords)


def _names_given(call: ast.Call) -> Iterator[ast.expr | None]:
    """The literal keys in a call of ``log`` or ``log_dict``; None for an argument with other keys."""
    assert isinstance(call.func, ast.Attribute)
    wanted = "name" if call.func.attr == "log" else "dictionary"
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == wanted)]
    for value in given[:1]:
        if wanted == "name":
            yield value
        else:
            yield from value.keys if isinstance(value, ast.Dict) else [None]


def _may_be(name: ast.expr | None, key: str) -> bool:
    """Whether an expression may evaluate to a key: its literal parts are part of the key."""
    if isinstance(name, ast.JoinedStr):
        known = (str(part.value) if isinstance(part, ast.Constant) else None for part in name.values)
        return re.fullmatch("".join(".*" if part is None else re.escape(part) for part in known), key) is not None
    return not isinstance(name, ast.Constant)


def _ends_iteration(node: ast.Raise | ast.Call) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "next" and len(node.args) == 1
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return isinstance(raised, ast.Name) and raised.id == "StopIteration"
