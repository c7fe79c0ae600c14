"""What decides whether a line of a source file is reached: conditions, loops and handlers around it, jumps before it.

It parses the source and executes nothing.
"""

import ast
import itertools
from collections.abc import Collection, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from lightning_ncclsafe.facts import ELSE, PAST, Branch, Decides
from lightning_ncclsafe.probes.source.handlers import Handler, handled_at, managers_in, name_called, suppresses
from lightning_ncclsafe.probes.source.rank_names import (
    RANK_WORDS,
    RankNames,
    given_beside_none,
    may_be_none,
    names_of_rank,
    names_set,
)
from lightning_ncclsafe.probes.source.syntax import (
    COMPREHENSIONS,
    FUNCTIONS,
    LOOPS,
    TRY_STATEMENTS,
    first_line,
    inside,
    last_line,
    name_of,
    parsed,
    source_text,
    statements_in,
    without_comment,
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
_MOST_BRANCHES = 8
_MOST_CHARACTERS = 120
_MOST_NAMES = 32
_JUMPS = {ast.Return: "return", ast.Continue: "continue", ast.Break: "break", ast.Raise: "raise"}
_Block = list[ast.stmt]


class Around(NamedTuple):
    """What decides whether a line is reached.

    Attributes:
        branches: The branches that may lead around it within its function, from outside in: the innermost 8.
        rank_condition: The innermost condition on the rank under which it runs, even one around the function that
            contains the line, with its line number: ``"if trainer.is_global_zero:  (line 41)"``; else empty.
        handler: The clause that handles an exception in the ``try`` around it, with its line number; empty if there is
            none, or if the line is also under a condition.
    """

    branches: tuple[Branch, ...] = ()
    rank_condition: str = ""
    handler: str = ""


class _Arm(NamedTuple):
    """A block of a statement, and what decides whether it runs.

    Attributes:
        block: Its statements.
        branch: What decides; None if it always runs.
        is_tried: Whether an exception may end it early without leaving the function.
        is_condition: Whether it may not run at all.
        is_function: Whether it runs when it is called.
    """

    block: _Block
    branch: Branch | None = None
    is_tried: bool = False
    is_condition: bool = False
    is_function: bool = False


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


@lru_cache(maxsize=64)
def control_flow(file: str) -> "ControlFlow":
    """How control flows in a source file, which is read; nothing is known of one that cannot be."""
    return ControlFlow(source_text(file), file)


class ControlFlow:
    """How control flows in one source file.

    What names mean in it is found when a condition asks for it: on a starved host, reading whole files takes longer
    than a look has.

    Args:
        source: Its text. If it cannot be parsed, nothing is known.
        file: Its path.
    """

    def __init__(self, source: str, file: str = "") -> None:
        self._lines, self._file = source.split("\n"), file
        self._known: dict[int, Around] = {}
        self._body = parsed(source).body
        self._of_rank: RankNames | None = None

    def around(self, line: int) -> Around:
        """What decides whether this line is reached."""
        known = self._known.get(line)
        if known is None:
            known = Around()
            with suppress(RecursionError):  # of an expression without end
                known = self._around(line)
            self._known[line] = known
        return known

    def _around(self, line: int) -> Around:
        branches: list[Branch] = []
        handler: str | None = ""
        rank_condition = ""
        for one in self._way(self._body, line):
            branch = one.branch if isinstance(one, _Arm) else one
            if isinstance(one, _Arm) and one.is_function:
                branches, handler = [], ""
            elif isinstance(one, _Arm) and one.is_condition:
                handler = None
            elif isinstance(one, _Arm) and one.is_tried and handler is not None and branch is not None:
                handler = branch.test
            if branch is not None:
                branches.append(branch)
                # A jump after the line, which ends the loop around it, has let all ranks reach the line once.
                is_before = not branch.jump or branch.line < line
                if branch.on is Decides.RANK and is_before:
                    rank_condition = f"{PAST}{branch.jump} under {branch.test}" if branch.jump else branch.test
        return Around(tuple(branches[-_MOST_BRANCHES:]), rank_condition, handler or "")

    @cached_property
    def _state(self) -> frozenset[str]:
        return _state_of(self._body)

    @cached_property
    def _managers(self) -> dict[str, Handler]:
        return managers_in(self._body)

    def _names_of_rank(self) -> RankNames:
        # Given at once when all are known: several threads ask.
        if self._of_rank is None:
            names = RankNames()
            with suppress(RecursionError):
                if RANK_WORDS.search("\n".join(self._lines)):
                    names = names_of_rank(self._body)
                    names = names._replace(held=self._held_on_some_ranks(names))
            self._of_rank = names
        return self._of_rank

    def _held_on_some_ranks(self, names: RankNames) -> frozenset[str]:
        # Conditions tell which names hold something on some ranks only, and need all other names for that.
        known = copy(self)
        known._known, known._of_rank = {}, names
        given = itertools.islice(given_beside_none(self._body).items(), _MOST_NAMES)
        conditions = {name: {known._condition_of_rank(value) for value in values} for name, values in given}
        # Under two conditions, each rank may have been given something.
        return frozenset(name for name, found in conditions.items() if len(found) == 1 and "" not in found)

    def _condition_of_rank(self, value: ast.expr) -> str:
        """The condition on the rank under which a value is given, and on other ranks none; empty if unknown."""
        if isinstance(value, ast.IfExp):
            is_of_rank = may_be_none(value) and self._decides(value.test) is Decides.RANK
            return ast.unparse(value.test) if is_of_rank else ""
        condition = self.around(value.lineno).rank_condition
        return "" if condition.startswith((ELSE, f"{PAST}raise")) else condition

    def _way(self, block: _Block, line: int) -> Iterator[Branch | _Arm]:
        """The jumps before a line and the blocks around it, from outside in, with what decides about them."""
        index = next((index for index, one in enumerate(block) if _is_within([one], line)), None)
        if index is None:
            return
        for before in block[:index]:
            yield from self._jumps(before)
        statement = block[index]
        arm = next((arm for arm in self._arms(statement) if _is_within(arm.block, line)), None)
        if arm is None:
            yield from self._in_head(statement)
        else:
            yield arm
            yield from self._way(arm.block, line)
        if isinstance(statement, LOOPS):
            # A jump that ends the loop leads around the line in the next pass.
            after = (one for one in statement.body if first_line(one) > line)
            yield from (jump for one in after for jump in self._jumps(one) if jump.jump in ("break", "return"))

    def _arms(self, statement: ast.stmt, *, of_jumps: bool = False) -> Iterator[_Arm]:
        """The blocks of a statement; or what decides about jumps in them, and so whether what is past these runs."""
        if isinstance(statement, ast.If):
            for block, without in ((statement.body, ""), (statement.orelse, ELSE)):
                # Past a jump in the block, as in the other block, the condition does not hold.
                decides = self._decides(statement.test, is_past=bool(without) is not of_jumps)
                yield _Arm(block, self._head(statement.lineno, decides, block, without), is_condition=True)
        elif isinstance(statement, LOOPS):
            yield _Arm(statement.body, self._passes(statement), is_condition=isinstance(statement, ast.While))
            yield _Arm(statement.orelse)
        elif isinstance(statement, TRY_STATEMENTS):
            yield from self._arms_of_try(statement)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            yield _Arm(statement.body, self._suppressed(statement), is_tried=True)
        elif isinstance(statement, ast.Match):
            decides = self._decides(statement.subject)
            heads = ((case.body, self._head(case.pattern.lineno, decides, case.body)) for case in statement.cases)
            yield from (_Arm(block, branch, is_condition=True) for block, branch in heads)
        elif isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            yield _Arm(statement.body, is_function=isinstance(statement, FUNCTIONS))

    def _arms_of_try(self, statement: ast.Try) -> Iterator[_Arm]:
        handled = self._handled(statement)
        yield _Arm(statement.body, handled, is_tried=True)
        yield _Arm(statement.orelse, handled)
        yield _Arm(statement.finalbody)
        for clause in statement.handlers:
            branch = self._head(clause.lineno, Decides.EXCEPTION, clause.body)
            yield _Arm(clause.body, branch, is_condition=True)

    def _in_head(self, statement: ast.stmt) -> Iterator[Branch]:
        """The branches within a statement without blocks, or within the condition of one that has blocks."""
        if isinstance(statement, ast.While) and (passes := self._passes(statement)) is not None:
            yield passes
        if isinstance(statement, (ast.If, ast.While)):
            yield from self._in_expression(statement.test)
        elif not any(self._arms(statement)):
            yield from self._in_expression(statement)

    def _in_expression(self, whole: ast.AST) -> Iterator[Branch]:
        """The branches of an expression: conditional expressions and comprehensions."""
        for node in inside(whole):
            if isinstance(node, (ast.IfExp, ast.BoolOp)):
                yield from self._in_condition(node, whole)
            elif isinstance(node, COMPREHENSIONS) and _calls(node) and not _is_counted(node.generators[0].iter):
                loop = node.generators[0]
                code = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
                yield _branch(node.lineno, Decides.PASSES, last_line(node), code)

    def _in_condition(self, node: ast.IfExp | ast.BoolOp, whole: ast.AST) -> Iterator[Branch]:
        if isinstance(node, ast.IfExp):
            test, arms = node.test, {"": _calls(node.body), ELSE: _calls(node.orelse)}
        else:
            test, without = node.values[0], "" if isinstance(node.op, ast.And) else ELSE
            arms = {without: [call for value in node.values[1:] for call in _calls(value)]}
        calling = [without for without, calls in arms.items() if calls]
        others = len(_calls(whole)) - len(_calls(test)) - sum(map(len, arms.values()))
        decides = self._decides(test)
        # The line does not show which of several calls on it runs.
        if calling and (decides is not Decides.RANK or (len(calling) == 1 and not others)):
            yield _branch(node.lineno, decides, last_line(node), f"if {ast.unparse(test)}", calling[0])

    def _jumps(self, statement: ast.stmt, around: tuple[Branch, ...] = ()) -> Iterator[Branch]:
        """The jumps in a statement that leave the block around it, each with its condition.

        A loop contains its own ``break`` and ``continue``. A ``raise`` counts only under a condition on the rank, as it
        ends the rank unless it is caught.
        """
        for kind, name in _JUMPS.items():
            if isinstance(statement, kind) and around and (name != "raise" or _of_all(around) is Decides.RANK):
                outer = (branch.test for branch in reversed(around[:-1]) if branch.on is Decides.RANK)
                jump = replace(around[-1], line=statement.lineno, jump=name, on=_of_all(around), until=0, handled_at="")
                yield replace(jump, within=next(outer, ""))
        is_loop = isinstance(statement, LOOPS)
        for arm in () if isinstance(statement, FUNCTIONS) else self._arms(statement, of_jumps=True):
            inner = around if arm.branch is None else (*around, arm.branch)
            for one in arm.block:
                yield from (jump for jump in self._jumps(one, inner) if not is_loop or jump.jump in ("return", "raise"))

    def _handled(self, statement: ast.Try) -> Branch | None:
        line = handled_at(statement)
        return self._head(line, Decides.EXCEPTION, statement.body) if line else None

    def _suppressed(self, statement: ast.With | ast.AsyncWith) -> Branch | None:
        """The ``with`` if it handles exceptions: by ``suppress``, or by a context manager of this file that does."""
        head = self._head(statement.lineno, Decides.EXCEPTION, statement.body)
        if suppresses(statement):
            return head
        managers = (self._managers.get(name_called(item.context_expr)) for item in statement.items)
        handler = next((one for one in managers if one is not None), None)
        if handler is None:
            return None
        code = without_comment(self._lines[handler.line - 1])
        place = f"{self._file}:{handler.line} in {handler.function}"
        return replace(head, test=f"{code[:_MOST_CHARACTERS]}  (line {handler.line})", handled_at=place)

    def _passes(self, statement: ast.For | ast.AsyncFor | ast.While) -> Branch | None:
        """The number of passes of a loop as a branch; None if that number is a constant in the source."""
        is_alike = _is_constant(statement.test) if isinstance(statement, ast.While) else _is_counted(statement.iter)
        return None if is_alike else self._head(statement.lineno, Decides.PASSES, statement.body)

    def _decides(self, test: ast.expr, *, is_past: bool = False) -> Decides:
        """What a condition depends on, or with ``is_past`` what runs where it does not hold.

        A counter or constant is the same on all ranks.
        """
        if self._names_of_rank().decides(test, is_past=is_past):
            return Decides.RANK
        return Decides.COMMON if self._is_common(test) else Decides.VALUE

    def _is_common(self, test: ast.expr) -> bool:
        """Whether all ranks find the same, as far as its names show."""
        if isinstance(test, ast.BoolOp):
            return all(map(self._is_common, test.values))
        if isinstance(test, ast.UnaryOp):
            return self._is_common(test.operand)
        is_alike = _is_constant(test) or _is_of_job(test) or _is_of_trainer(test)
        return is_alike or _is_counter(test, self._state) or self._is_of_part(test)

    def _is_of_part(self, test: ast.expr) -> bool:
        """Whether a condition in a loop over a model's parts is on the name, class or dimensions of a part alone."""
        around = [loop for loop in self._loops_over_parts if test.lineno in loop.lines]
        names = {loop.name for loop in around if loop.name}
        return _asks_only(test, names, {loop.part for loop in around})

    @cached_property
    def _loops_over_parts(self) -> list[_PartsLoop]:
        has_any = any(f"{name}(" in line for line in self._lines for name in (*_PARTS, *_NAMED_PARTS))
        nodes = (node for statement in self._body if has_any for node in ast.walk(statement))
        loops = (_parts_loop(node) for node in nodes if isinstance(node, ast.For))
        return [loop for loop in loops if loop is not None]

    def _head(self, line: int, on: Decides, block: _Block, without: str = "") -> Branch:
        """The branch at a line that decides whether a block runs."""
        return _branch(line, on, last_line(block[-1]) if block else 0, without_comment(self._lines[line - 1]), without)


def _branch(line: int, on: Decides, until: int, code: str, without: str = "") -> Branch:
    return Branch(line=line, test=f"{without}{code[:_MOST_CHARACTERS]}  (line {line})", on=on, until=until)


def _of_all(around: tuple[Branch, ...]) -> Decides:
    """What it depends on whether a jump within all these branches is reached."""
    if len(around) == 1:
        return around[0].on
    return Decides.EXCEPTION if any(branch.on is Decides.EXCEPTION for branch in around) else Decides.VALUE


def _is_of_job(test: ast.expr) -> bool:
    """Whether a condition is on nothing but what all ranks of a job have in common."""
    if isinstance(test, ast.BoolOp):
        return all(map(_is_of_job, test.values))
    if isinstance(test, ast.UnaryOp):
        return _is_of_job(test.operand)
    if isinstance(test, ast.Compare):
        sides = (test.left, *test.comparators)
        return any(map(_is_of_job, sides)) and all(_is_of_job(side) or _is_constant(side) for side in sides)
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
        return len(others) < len(sides) and all(map(_is_constant, others))
    if not isinstance(test, ast.Call) or not test.args:
        return False
    if _id(test.func) == "isinstance":
        return _id(test.args[0]) in parts and len(test.args) > 1 and _is_class(test.args[1])
    if not isinstance(test.func, ast.Attribute) or _id(test.func.value) not in names:
        return False
    return test.func.attr in ("startswith", "endswith") and all(map(_is_constant, test.args))


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
        return _is_function_of_trainer(test.left) and all(map(_is_constant, test.comparators))
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
    return not _calls(test) and not named.isdisjoint(_COUNTED) and named.isdisjoint(state - _COUNTED - _COUNTING)


def _state_of(body: _Block) -> frozenset[str]:
    """The attributes that a file sets outside of ``__init__``."""
    functions = (one for one in statements_in(body) if isinstance(one, FUNCTIONS))
    nodes = (node for one in functions if one.name != "__init__" for node in ast.walk(one))
    set_in = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(node.attr for node in set_in)


def _is_counted(items: ast.expr) -> bool:
    """Whether a loop has the same number of passes on all ranks: the number is a constant in the source."""
    if isinstance(items, ast.Call) and isinstance(items.func, ast.Name) and items.func.id == "range":
        return all(map(_is_constant, items.args))
    if isinstance(items, (ast.Tuple, ast.List)):
        return not any(isinstance(item, ast.Starred) for item in items.elts)
    return _is_constant(items)


def _is_constant(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in inside(node) if isinstance(inner, ast.Call)]


def _is_within(block: _Block, line: int) -> bool:
    return bool(block) and first_line(block[0]) <= line <= last_line(block[-1])
