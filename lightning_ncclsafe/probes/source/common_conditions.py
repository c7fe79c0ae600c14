"""Conditions that all ranks answer alike: on counters, constants, what the Trainer runs, and the parts of a model.

The Trainer counts batches and epochs on all ranks, and all of them have the same model. What a condition is on shows in
its names alone.
"""

import ast
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

from lightning_ncclsafe.probes.source.rank_names import names_set
from lightning_ncclsafe.probes.source.syntax import (
    FUNCTIONS,
    calls_within,
    first_line,
    is_any_constant,
    last_line,
    name_of,
    statements_in,
)

# Counters that are equal on all ranks, so that conditions on them are, too.
_COUNTED = frozenset(
    ("batch_idx", "batch_index", "dataloader_idx", "current_epoch", "epoch", "global_step", "sanity_checking", "stage")
)
# What a Trainer runs is equal on all ranks, too: ``trainer.validating``, ``trainer.state.fn``.
_OF_TRAINER = frozenset(("validating", "testing", "predicting", "evaluating"))
# What has them: that a file keeps it is no reason why they should differ.
_COUNTING = frozenset(("trainer", "pl_module", "module", "model"))
# What all ranks of one job have in common: whether there are several, and what their machines can do.
_ASKED_OF_JOB = frozenset(("is_initialized", "is_available", "is_torchelastic_launched", "get_world_size"))
_MODULES = frozenset(("dist", "distributed", "c10d", "cuda"))
# Methods that give the parts of a model, alone or with their names, and what a model is called: all ranks have the same
# parts, of the same names and classes.
_MODELS = frozenset(("model", "module", "net", "network", "pl_module", "lightning_module", "self"))
_PARTS = frozenset(("parameters", "modules"))
_NAMED_PARTS = frozenset(("named_parameters", "named_modules", "named_children", "named_buffers", "state_dict"))


_BY_SIZE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_AMOUNTS = frozenset(("len", "numel", "nelement", "size", "shape", "count", "count_nonzero", "sum"))


class _PartsLoop(NamedTuple):
    """A loop over a model's parts, such as its parameters.

    Attributes:
        lines: The lines of its body.
        name: The variable that it gives the name of a part; empty if it gives none.
        part: The variable that it gives a part.
    """

    lines: range
    name: str
    part: str


class CommonConditions:
    """Which conditions in a source file are the same on all ranks.

    Args:
        body: Its statements.
    """

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        self._body = body

    def has(self, test: ast.expr) -> bool:
        """Whether all ranks find the same, as far as the names in a condition show."""
        if isinstance(test, ast.BoolOp):
            return all(map(self.has, test.values))
        if isinstance(test, ast.UnaryOp):
            return self.has(test.operand)
        is_alike = is_any_constant(test) or _is_of_job(test) or _is_of_trainer(test)
        return is_alike or _is_counter(test, self._state) or self._is_of_part(test)

    @cached_property
    def _state(self) -> frozenset[str]:
        """The attributes that the file sets outside of ``__init__``."""
        functions = (one for one in statements_in(self._body) if isinstance(one, FUNCTIONS))
        nodes = (node for one in functions if one.name != "__init__" for node in ast.walk(one))
        set_in = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        return frozenset(node.attr for node in set_in)

    def _is_of_part(self, test: ast.expr) -> bool:
        """Whether a condition in a loop over a model's parts is on the name, class or dimensions of a part alone."""
        around = [loop for loop in self._loops_over_parts if test.lineno in loop.lines]
        names = {loop.name for loop in around if loop.name}
        return _asks_only(test, names, {loop.part for loop in around})

    @cached_property
    def _loops_over_parts(self) -> list[_PartsLoop]:
        nodes = (node for node in statements_in(self._body) if isinstance(node, ast.For))
        return [loop for loop in map(_parts_loop, nodes) if loop is not None]


def compares_with_limit(test: ast.expr) -> bool:
    """Whether a condition compares a value with a limit: ``score >= self.best``, but not ``len(boxes) < 1``.

    Whether there is any data is no such comparison.
    """
    compared = (node for node in ast.walk(test) if isinstance(node, ast.Compare))
    return any(
        isinstance(operator, _BY_SIZE) and not any(map(_is_amount, (one.left, *one.comparators)))
        for one in compared
        for operator in one.ops
    )


def _is_amount(value: ast.expr) -> bool:
    """Whether it is 0 or 1, or how much there is of something: ``len(x)``, ``x.numel()``, ``x.shape[0]``."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, (int, float)) and value.value in (0, 1)
    names = (name_of(node) for node in ast.walk(value) if isinstance(node, (ast.Name, ast.Attribute)))
    return any(name in _AMOUNTS for name in names)


def _is_of_job(test: ast.expr) -> bool:
    """Whether a condition is on nothing but what all ranks of a job have in common."""
    if isinstance(test, ast.BoolOp):
        return all(map(_is_of_job, test.values))
    if isinstance(test, ast.UnaryOp):
        return _is_of_job(test.operand)
    if isinstance(test, ast.Compare):
        sides = (test.left, *test.comparators)
        return any(map(_is_of_job, sides)) and all(_is_of_job(side) or is_any_constant(side) for side in sides)
    if not isinstance(test, ast.Call):
        return name_of(test) == "world_size"
    # Members of a group know another size than other ranks, and a model may keep for itself whether it is initialized.
    is_plain = not test.args and not test.keywords
    is_of_module = name_of(test.func.value) in _MODULES if isinstance(test.func, ast.Attribute) else True
    return is_plain and is_of_module and name_of(test.func) in _ASKED_OF_JOB


def _parts_loop(loop: ast.For) -> _PartsLoop | None:
    """The loop, if it goes through a model's parts and nothing else, and if nothing in it sets its variables anew."""
    items = loop.iter
    if _called(items) == "items" and isinstance(items, ast.Call) and isinstance(items.func, ast.Attribute):
        items = items.func.value
    called = _called(items)
    asked = items.func.value if isinstance(items, ast.Call) and isinstance(items.func, ast.Attribute) else None
    if asked is None or name_of(asked) not in _MODELS or (called == "state_dict") is (items is loop.iter):
        return None
    targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
    variables = [_id(one) or "" for one in targets]
    if not all(variables) or len(variables) != (called in _NAMED_PARTS) + 1 or called not in (_PARTS | _NAMED_PARTS):
        return None
    nodes = (node for statement in loop.body for node in ast.walk(statement))
    set_anew = {name for node in nodes for name in names_set(node)}
    lines = range(first_line(loop.body[0]), last_line(loop.body[-1]) + 1)
    name, part = variables if len(variables) > 1 else ("", *variables)
    return _PartsLoop(lines, name, part) if set_anew.isdisjoint(variables) else None


def _called(value: ast.expr) -> str:
    return name_of(value.func) if isinstance(value, ast.Call) else ""


def _asks_only(test: ast.expr, names: Collection[str], parts: Collection[str]) -> bool:
    """Whether a condition asks what all ranks answer alike of a name or part of a model, and nothing else."""
    if isinstance(test, ast.Compare):
        sides = (test.left, *test.comparators)
        others = [side for side in sides if not (_id(side) in names or _has_dimensions(side, parts))]
        return len(others) < len(sides) and all(map(is_any_constant, others))
    if not isinstance(test, ast.Call) or not test.args:
        return False
    if _id(test.func) == "isinstance":
        return _id(test.args[0]) in parts and len(test.args) > 1 and _is_class(test.args[1])
    if not isinstance(test.func, ast.Attribute) or _id(test.func.value) not in names:
        return False
    return test.func.attr in ("startswith", "endswith") and all(map(is_any_constant, test.args))


def _is_class(value: ast.expr) -> bool:
    """Whether it is written as a class, or several: ``nn.Linear``."""
    if isinstance(value, ast.Tuple):
        return all(map(_is_class, value.elts))
    is_plain = isinstance(value, (ast.Name, ast.Attribute)) and not ast.unparse(value).startswith("self.")
    return is_plain and name_of(value)[:1].isupper()


def _has_dimensions(value: ast.expr, parts: Collection[str]) -> bool:
    """Whether it is the number of dimensions of a part: ``p.ndim`` or ``p.dim()``."""
    attribute = value.func if isinstance(value, ast.Call) else value
    return isinstance(attribute, ast.Attribute) and attribute.attr in ("ndim", "dim") and _id(attribute.value) in parts


def _is_of_trainer(test: ast.expr) -> bool:
    """Whether a condition is on what the Trainer runs: ``trainer.testing``, ``trainer.state.fn == "fit"``."""
    if isinstance(test, ast.Compare):
        return _is_function_of_trainer(test.left) and all(map(is_any_constant, test.comparators))
    return isinstance(test, ast.Attribute) and test.attr in _OF_TRAINER and name_of(test.value) == "trainer"


def _is_function_of_trainer(value: ast.expr) -> bool:
    """Whether it is ``trainer.state.fn``."""
    state = value.value if isinstance(value, ast.Attribute) and value.attr == "fn" else None
    return isinstance(state, ast.Attribute) and state.attr == "state" and name_of(state.value) == "trainer"


def _id(value: ast.expr) -> str | None:
    return value.id if isinstance(value, ast.Name) else None


def _is_counter(test: ast.expr, state: frozenset[str]) -> bool:
    """Whether a condition is on a counter, and on nothing that may differ: settings do not, but state may."""
    named = {name_of(node) for node in ast.walk(test) if isinstance(node, (ast.Name, ast.Attribute))}
    return not calls_within(test) and not named.isdisjoint(_COUNTED) and named.isdisjoint(state - _COUNTED - _COUNTING)
