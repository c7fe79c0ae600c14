"""Finds parameters that DDP complains about, and the line of user code that skips them or makes them."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import Branch, Decides
from lightning_ncclsafe.probes.source.scopes import Scope, attributes_set, places_in, scopes_in
from lightning_ncclsafe.probes.source.syntax import COMPREHENSIONS, is_constant, is_of_self, name_of, nodes_in

# DDP numbers the parameters that required a gradient when it was created.
_NO_GRADIENT = re.compile(r"indices which did not receive grad for rank \d+:((?: \d+)+)")
_OTHER_SIZE = re.compile(r"params\[(\d+)\] in this process with sizes")
# Lightning divides a loss by the number of batches that accumulate, and a precision may scale it.
_MOST_OPERATIONS = 4
# From a line that uses a part of the model outwards, to the hook.
_MOST_CALLERS = 3
# What a part is used under; an exception is no such thing.
_DECIDING = (Decides.RANK, Decides.VALUE, Decides.PASSES)
_USUAL = {"forward": 0, "training_step": 1}
# What Lightning calls before the first batch.
_BEFORE_TRAINING = {"__init__", "configure_model", "configure_optimizers", "prepare_data", "setup"}
_GRADIENT_MODES = {"no_grad", "inference_mode", "set_grad_enabled"}
# From what a part of the model returns to the loss.
_MOST_VARIABLES = 4


def trained_parameters(module: Any) -> list[str]:
    """The parameters that require a gradient."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def named_by_ddp(error: str, trained: Sequence[str]) -> list[str]:
    """The parameters without a gradient according to an error of DDP.

    Args:
        trained: The ones that required a gradient when DDP was created.
    """
    named = _NO_GRADIENT.search(error)
    numbers = map(int, named[1].split()) if named else ()
    return [trained[number] for number in numbers if number < len(trained)]


def of_other_size(error: str, module: Any) -> str:
    """The parameter of a module that has another size than on rank 0, according to an error of DDP; else empty."""
    named = _OTHER_SIZE.search(error)
    names = trained_parameters(module) if named is not None and module is not None else []
    return names[int(named[1])] if named is not None and int(named[1]) < len(names) else ""


def made_at(module: Any, parameter: str) -> str:
    """The line of user code that sets the innermost part of the model with a parameter; empty if unknown."""
    owners, parts = [module], parameter.split(".")
    for part in parts[:-1]:
        owners.append(getattr(owners[-1], part, None))
    inside_out = [*zip(owners, parts, strict=True)][::-1]
    places = (place for owner, part in inside_out for scope in scopes_in([owner]) for place in scope.sets([part]))
    return next(places, "")


def without_gradient(module: Any) -> list[str]:
    """Trained parameters without a gradient; empty if none has one, as after ``zero_grad``."""
    if module is None:
        return []
    wanted = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    missing = [name for name, parameter in wanted if parameter.grad is None]
    return missing if len(missing) < len(wanted) else []


def is_from_nothing(loss: Any, module: Any) -> bool:
    """Whether the graph of a loss leads, in a few operations, only to a tensor that is not a parameter."""
    node = getattr(loss, "grad_fn", None)
    if node is None:
        return loss is not None
    for _ in range(_MOST_OPERATIONS):
        before = [function for function, _ in node.next_functions if function is not None]
        if len(before) != 1:
            return False
        node = before[0]
        if (leaf := getattr(node, "variable", None)) is not None:
            return all(leaf is not parameter for parameter in module.parameters())
    return False


def left_out_at(module: Any, missing: list[str]) -> tuple[str, Branch | None]:
    """The line of user code that skips, or else uses, the largest unused part with the first of these parameters.

    If it is used without gradients, that of the ``with`` statement which switches them off; if what it returns is not
    used, the line that leaves that out.

    Returns:
        The line; and of one that uses the part, the only condition or loop around it, or of a jump, that jump.
    """
    names = trained_parameters(module)
    parts = missing[0].split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    whole = (part for part in prefixes if all(name in missing for name in names if name.startswith(f"{part}.")))
    depth = len(next(whole, missing[0]).split("."))
    # Outwards to the user code that calls this part; code called there may still skip its components.
    used = next(filter(None, (_use_of(module, parts, level) for level in range(depth - 1, -1, -1))), None)
    if used is not None and used.without_gradients_at:
        return used.without_gradients_at, None
    within = (_use_of(module, parts, level) for level in range(depth, len(parts)))
    skipped = next((use for use in (used, *within) if use is not None and use.leads_around), None)
    if skipped is None and used is not None:
        used = skipped = used.of_output()
    if skipped is not None and len(skipped.leads_around) == 1 and not skipped.conditions_around:
        return skipped.leads_around[0], skipped.jump_around
    return (used.place, used.branch_around) if used is not None else ("", None)


class _Use(NamedTuple):
    """A line that uses a part of the model: in which function, as which attribute."""

    scope: Scope
    line: int
    part: str
    without_gradients_at: str

    @property
    def place(self) -> str:
        return self.scope.place(self.line)

    @property
    def leads_around(self) -> tuple[str, ...]:
        """The lines that may skip it."""
        return self.scope.leads_around(self.line)

    @property
    def conditions_around(self) -> tuple[str, ...]:
        return self.scope.conditions_around(self.line)

    @property
    def branch_around(self) -> Branch | None:
        """The only one that decides whether it is run; None if several do, or none does."""
        branches = [one for one in self.scope.branches_around(self.line) if one.on in _DECIDING]
        return branches[0] if len(branches) == 1 and not branches[0].jump else None

    @property
    def jump_around(self) -> Branch | None:
        """The first jump that may skip it, with its condition; None if there is none."""
        return next((one for one in self.scope.branches_around(self.line) if one.jump), None)

    def of_output(self) -> "_Use":
        """The use of what the part has returned, if something may skip every one of these; else this one."""
        line = _line_of_output(self.scope, self.line, self.part)
        return self._replace(line=line) if line else self


def _use_of(module: Any, parts: list[str], level: int) -> _Use | None:
    """Where the user code of a module uses one of its parts: calls it, or else names it.

    If nothing leads around that line in a function, where that function is called, if a jump does there.
    """
    for name in parts[:level]:
        module = getattr(module, name, None)
    functions = _functions_of(module)
    scopes = [scope for scope in functions if _line_of_use(scope, parts[level])]
    for scope in sorted(scopes, key=lambda scope: not _calls(scope, parts[level])):
        line = _line_of_use(scope, parts[level])
        off = scope.place(_line_without_gradients(scope, line))
        return _Use(*_decided_in(scope, line, functions), parts[level], off)
    return None


def _decided_in(scope: Scope, line: int, functions: Sequence[Scope]) -> tuple[Scope, int]:
    """The function that jumps around a line: that of the line, or the only one that calls it; and its line.

    A condition around the call is no jump: what it leaves out is shown at the line itself.

    Args:
        scope: The function of the line.
        line: The line.
        functions: Those of the object and its bases, in which methods that override others come before these.
    """
    decides, at = scope, line
    for _ in range(_MOST_CALLERS):
        if decides.leads_around(at):
            break
        overriding = [one for one in functions if one.name == decides.name]
        if above := overriding[: overriding.index(decides)]:
            calls = [(above[-1], call) for call in _calls_on(above[-1], "super", decides.name)]
        else:
            calls = [(one, call) for one in functions for call in _calls_on(one, "self", decides.name)]
        if len(calls) != 1:
            break
        ((decides, at),) = calls
    is_jump = decides.leads_around(at) and not decides.conditions_around(at)
    return (decides, at) if is_jump else (scope, line)


def _functions_of(part: Any) -> list[Scope]:
    """The functions that run in a step, the usual ones first; of those that others override, those that these call."""
    reached: dict[str, list[Scope]] = {}
    for scope in scopes_in([part]):
        overriding = reached.setdefault(scope.name, [])
        if not overriding or _calls_on(overriding[-1], "super", scope.name):
            overriding.append(scope)
    in_steps = (scope for name, each in reached.items() if name not in _BEFORE_TRAINING for scope in each)
    return sorted(in_steps, key=lambda scope: _USUAL.get(scope.name, len(_USUAL)))


def _calls_on(scope: Scope, owner: str, method: str) -> list[int]:
    """The lines that call a method of ``self`` or, with ``owner="super"``, of the classes behind this one's."""
    called = ((call.lineno, ast.unparse(call.func)) for call in scope.calls([method]))
    return [line for line, whole in called if re.match(rf"{owner}(\(.*\))?\.{method}$", whole)]


def _line_of_use(scope: Scope, attribute: str) -> int:
    """The first line that calls or names ``self.attribute``, or calls one of those in it; 0 if there is none."""
    named = _named(scope, attribute)
    return next(_calls_of_each(scope, named), 0) or next((node.lineno for node in named), 0)


def _calls(scope: Scope, attribute: str) -> bool:
    """Whether it calls ``self.attribute``, or one of those in it, and does not only name it, as ``len`` does."""
    named = _named(scope, attribute)
    called = (call.func for call in scope.each(ast.Call))
    callees = (callee.value if isinstance(callee, ast.Subscript) else callee for callee in called)
    return any(callee in named for callee in callees) or any(_calls_of_each(scope, named))


def _named(scope: Scope, attribute: str) -> list[ast.Attribute]:
    named = (node for node in scope.each(ast.Attribute) if node.attr == attribute)
    return [node for node in named if isinstance(node.value, ast.Name)]


def _calls_of_each(scope: Scope, named: list[ast.Attribute]) -> Iterator[int]:
    """The lines that call what loops and comprehensions take from these."""
    loops = [(loop.target, loop.iter, [*nodes_in(loop.body)]) for loop in scope.each(ast.For)]
    for made in scope.each(ast.expr):
        parts = made.generators if isinstance(made, COMPREHENSIONS) else []
        loops += [(part.target, part.iter, [*ast.walk(made)]) for part in parts]
    for target, taken_from, body in loops:
        if any(node in named for node in ast.walk(taken_from)):
            names = _names_in(target)
            calls = (node for node in body if isinstance(node, ast.Call))
            yield from (call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id in names)


def _line_of_output(scope: Scope, line: int, attribute: str) -> int:
    """The first line that uses what ``self.attribute`` returned on a line, if the same branches lead around all.

    Variables that are computed from it are followed, a few times. 0 if a use is certain, or none is known.
    """
    assigned = {node.lineno: node for node in scope.each(ast.Assign)}
    made = (node for node in assigned.values() if node.lineno <= line <= (node.end_lineno or 0))
    names = {name for node in made for name in _names_made_from(node, attribute)}
    for _ in range(_MOST_VARIABLES):
        read = (node for node in scope.each(ast.Name) if node.id in names and isinstance(node.ctx, ast.Load))
        lines = sorted({node.lineno for node in read if node.lineno > line})
        branches = {scope.leads_around(one) for one in lines}
        if not lines or () not in branches:
            return lines[0] if len(branches) == 1 else 0
        certain = [one for one in lines if not scope.leads_around(one)]
        if not assigned.keys() >= {*certain}:
            return 0
        names = {name for one in certain for target in assigned[one].targets for name in _names_in(target)}
        line = certain[0]
    return 0


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


def _line_without_gradients(scope: Scope, line: int) -> int:
    """The line of the innermost ``with`` around a line that may switch gradients off; 0 if there is none."""
    around = (block for block in scope.each(ast.With) if block.lineno < line <= (block.end_lineno or 0))
    return max((block.lineno for block in around if any(map(_is_gradient_mode, block.items))), default=0)


def _is_gradient_mode(item: ast.withitem) -> bool:
    parts = (node for node in ast.walk(item.context_expr) if isinstance(node, ast.expr))
    return any(name_of(node) in _GRADIENT_MODES for node in parts)


def frozen_at(owners: Iterable[Any]) -> tuple[str, ...]:
    """Where the user's functions of these objects may set ``requires_grad`` to false during training."""
    return places_in(owners, lambda scope: _while_training(scope, _freezes))


def leaves_at(module: Any) -> tuple[str, ...]:
    """Where a module makes a tensor that is computed from no parameter require a gradient."""
    return places_in([module], lambda scope: _while_training(scope, _makes_leaf))


def _while_training(scope: Scope, is_wanted: Callable[[ast.AST], bool]) -> Iterator[str]:
    if scope.name not in _BEFORE_TRAINING:
        yield from (scope.place(getattr(node, "lineno", 0)) for node in scope.nodes if is_wanted(node))


def _freezes(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return any(one.name == "requires_grad" and not is_constant(one.value, True) for one in attributes_set(node))
    if not isinstance(node, ast.Call):
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    is_set = name_of(node.func) == "requires_grad_" and bool(given) and not is_constant(given[0], True)
    return is_set or name_of(node.func) == "freeze"


def _makes_leaf(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if name_of(node.func) == "requires_grad_":
        return not any(is_constant(value, False) for value in node.args)
    return any(keyword.arg == "requires_grad" and not is_constant(keyword.value, False) for keyword in node.keywords)
