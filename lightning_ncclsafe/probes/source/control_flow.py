"""What decides whether a line of a source file is reached: conditions, loops and handlers around it, jumps before it.

It parses the source and executes nothing.
"""

import ast
import itertools
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from lightning_ncclsafe.facts import ELSE, PAST, Branch, Decides
from lightning_ncclsafe.probes.source.common_conditions import CommonConditions, compares_with_limit
from lightning_ncclsafe.probes.source.handlers import Handler, handled_at, managers_in, name_called, suppresses
from lightning_ncclsafe.probes.source.rank_names import (
    RANK_WORDS,
    RankNames,
    given_beside_none,
    may_be_none,
    names_of_rank,
)
from lightning_ncclsafe.probes.source.syntax import (
    COMPREHENSIONS,
    FUNCTIONS,
    LOOPS,
    TRY_STATEMENTS,
    calls_within,
    first_line,
    inside,
    is_any_constant,
    last_line,
    parsed,
    source_text,
    without_comment,
)

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
    def _common(self) -> CommonConditions:
        return CommonConditions(self._body)

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
                head = self._head(statement.lineno, decides, block, without)
                differs = decides is Decides.VALUE and compares_with_limit(statement.test)
                yield _Arm(block, replace(head, differs_at=head.line) if differs else head, is_condition=True)
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
            elif isinstance(node, COMPREHENSIONS) and calls_within(node) and not _is_counted(node.generators[0].iter):
                loop = node.generators[0]
                code = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
                yield _branch(node.lineno, Decides.PASSES, last_line(node), code)

    def _in_condition(self, node: ast.IfExp | ast.BoolOp, whole: ast.AST) -> Iterator[Branch]:
        if isinstance(node, ast.IfExp):
            test, arms = node.test, {"": calls_within(node.body), ELSE: calls_within(node.orelse)}
        else:
            test, without = node.values[0], "" if isinstance(node.op, ast.And) else ELSE
            arms = {without: [call for value in node.values[1:] for call in calls_within(value)]}
        calling = [without for without, calls in arms.items() if calls]
        others = len(calls_within(whole)) - len(calls_within(test)) - sum(map(len, arms.values()))
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
                outer = next((branch.test for branch in reversed(around[:-1]) if branch.on is Decides.RANK), "")
                jump = replace(around[-1], line=statement.lineno, jump=name, on=_of_all(around), until=0, handled_at="")
                is_condition = around[-1].on in (Decides.VALUE, Decides.COMMON)
                differs_at = around[-1].line if name == "break" and is_condition else jump.differs_at
                yield replace(jump, within=outer, differs_at=0 if outer else differs_at)
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
        is_alike = is_any_constant(statement.test) if isinstance(statement, ast.While) else _is_counted(statement.iter)
        return None if is_alike else self._head(statement.lineno, Decides.PASSES, statement.body)

    def _decides(self, test: ast.expr, *, is_past: bool = False) -> Decides:
        """What a condition depends on, or with ``is_past`` what runs where it does not hold.

        A counter or constant is the same on all ranks.
        """
        if self._names_of_rank().decides(test, is_past=is_past):
            return Decides.RANK
        return Decides.COMMON if self._common.has(test) else Decides.VALUE

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


def _is_counted(items: ast.expr) -> bool:
    """Whether a loop has the same number of passes on all ranks: the number is a constant in the source."""
    if isinstance(items, ast.Call) and isinstance(items.func, ast.Name) and items.func.id == "range":
        return all(map(is_any_constant, items.args))
    if isinstance(items, (ast.Tuple, ast.List)):
        return not any(isinstance(item, ast.Starred) for item in items.elts)
    return is_any_constant(items)


def _is_within(block: _Block, line: int) -> bool:
    return bool(block) and first_line(block[0]) <= line <= last_line(block[-1])
