"""Which names in a source file mean the rank: its own names, tests of them, and what only some ranks have."""

import ast
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lightning_ncclsafe.probes.source.syntax import FUNCTIONS, is_constant, is_of_self, name_of, statements_in

# Names in conditions that hold on some ranks only, as Lightning, torch and common training scripts use them.
_TESTS = "is_global_zero|is_master|is_main_process|is_local_main_process|is_rank_zero|is_rank_0|is_first_rank"
# Those of torch.distributed, and of a DeviceMesh.
_GETTERS = ("get_rank", "get_node_local_rank", "get_local_rank", "get_coordinate")
_RANKS = "|".join(("global_rank", "local_rank", "node_rank", "rank", "LOCAL_RANK", "RANK", *_GETTERS))
_TEST_NAME, _RANK_NAME = re.compile(_TESTS), re.compile(rf"\b(?:{_RANKS})\b")
RANK_WORDS = re.compile(rf"\b(?:{_TESTS}|{_RANKS})\b")
"""Finds a name of the rank, or of a test of it, in a source text."""
_SELF = "self."
_Block = list[ast.stmt]


class RankNames(NamedTuple):
    """Names that mean the rank in a file.

    Attributes:
        tests: Those of tests of the rank: ``main = rank == 0``, or of a function that returns one.
        ranks: Those of the rank itself: ``me = dist.get_rank()``.
        held: Those that get a value other than None only under a condition on the rank: ``self.writer``.
    """

    tests: frozenset[str] = frozenset()
    ranks: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()

    def decides(self, test: ast.expr, *, is_past: bool = False) -> bool:
        """Whether a condition depends on the rank: it contains the rank, or a name that means it.

        Args:
            is_past: Whether it is about what runs where the condition does not hold.
        """
        if RANK_WORDS.search(ast.unparse(test)) or not self.tests.isdisjoint(_tested(test)):
            return True
        return not self.ranks.isdisjoint(_compared(test)) or not self.held.isdisjoint(_held(test, is_past=is_past))


def names_of_rank(body: _Block) -> RankNames:
    """What a file's names mean, as far as each means nothing else."""
    given: dict[str, list[ast.expr | None]] = {}
    for node in statements_in(body):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                given.setdefault(name_of(target), []).append(node.value)
        elif isinstance(node, FUNCTIONS):
            returned = [one.value for one in statements_in(node.body) if isinstance(one, ast.Return)]
            given.setdefault(node.name, []).extend(returned or [None])
    return RankNames(_only(given, _tests_rank), _only(given, _is_rank))


def given_beside_none(body: _Block) -> dict[str, list[ast.expr]]:
    """What names and attributes of ``self`` are set to besides None, if a condition tests them for None.

    Only those that one function, or the methods of one class, give and test, and that nothing else may set.
    """
    values = (value for one in statements_in(body) for _, value in _assignments(one))
    if not any(map(may_be_none, values)):
        return {}
    given: dict[str, list[ast.expr]] = defaultdict(list)
    bound: Counter[str] = Counter()
    places: dict[str, set[int]] = defaultdict(set)
    for node, function, owner in _with_places(body):
        # What a class gives to a name is an attribute of its objects.
        prefix = _SELF if owner and not function else ""
        for target, value in _assignments(node):
            given[_in_class(ast.unparse(target), prefix)].append(value)
        binds = [_in_class(name, prefix) for name in names_set(node)]
        bound.update(binds)
        tests = _held(node.test, is_past=True) if isinstance(node, (ast.If, ast.While, ast.IfExp)) else set()
        for name in (*binds, *tests):
            places[name].add(owner if name.startswith(_SELF) else function)
    return {
        name: [value for value in values if not is_constant(value, None)]
        for name, values in given.items()
        if bound[name] == len(values) and len(places[name]) == 1 and any(map(may_be_none, values))
    }


def _in_class(name: str, prefix: str) -> str:
    return name if name.startswith(_SELF) else f"{prefix}{name}"


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The names and attributes of ``self`` to which a statement gives a value as it is, each with that."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) or is_of_self(target):
                yield target, node.value


def _with_places(body: _Block) -> Iterator[tuple[ast.AST, int, int]]:
    """Every node with the line of the function and of the class that it is in; 0 for none."""
    left: list[tuple[ast.AST, int, int]] = [(statement, 0, 0) for statement in reversed(body)]
    while left:
        node, function, owner = left.pop()
        yield node, function, owner
        if isinstance(node, (*FUNCTIONS, ast.Lambda)):
            function = node.lineno
        elif isinstance(node, ast.ClassDef):
            function, owner = 0, node.lineno
        left += [(child, function, owner) for child in ast.iter_child_nodes(node)][::-1]


def names_set(node: ast.AST) -> Iterator[str]:
    """The names that a node may set; an attribute of any object may be that of ``self``."""
    if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        yield getattr(node, "id", "") or f"{_SELF}{getattr(node, 'attr', '')}"
    elif isinstance(node, ast.ClassDef) and node.decorator_list:  # a dataclass is given its attributes
        yield from (f"{_SELF}{name_of(one.target)}" for one in node.body if isinstance(one, ast.AnnAssign))
    elif isinstance(node, (ast.arg, ast.alias)):
        yield getattr(node, "arg", "") or getattr(node, "asname", "") or getattr(node, "name", "")
    elif isinstance(node, (*FUNCTIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        yield node.name or ""


def _held(test: ast.expr, *, is_past: bool = False) -> set[str]:
    """What a condition tests for being None, or true, by itself: ``self.writer``, ``self.writer is not None``.

    Where ``self.writer is None or is_over`` does not hold, there is a writer, too.
    """
    if isinstance(test, ast.BoolOp):
        counts = (isinstance(test.op, ast.And) or (is_past and _is_negative(value)) for value in test.values)
        return {name for value in itertools.compress(test.values, counts) for name in _held(value)}
    if isinstance(test, ast.UnaryOp):
        return _held(test.operand)
    if isinstance(test, ast.Compare):
        return _held(test.left) if is_constant(test.comparators[0], None) else set()
    return {ast.unparse(test)} if isinstance(test, ast.Name) or is_of_self(test) else set()


def _is_negative(test: ast.expr) -> bool:
    """Whether a test holds for what is None, or false."""
    is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return is_not or (isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.Eq)))


def may_be_none(value: ast.expr) -> bool:
    """Whether it is None, or a conditional expression of which one side is."""
    sides = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
    return any(is_constant(side, None) for side in sides)


def _only(given: dict[str, list[ast.expr | None]], is_so: Callable[[ast.expr], bool]) -> frozenset[str]:
    """The names that are given to nothing else."""
    return frozenset(name for name, values in given.items() if name and all(one and is_so(one) for one in values))


def _is_rank(value: ast.expr) -> bool:
    """Whether it is the rank itself: ``self.global_rank``, ``dist.get_rank()``, ``int(os.environ["RANK"])``."""
    if isinstance(value, ast.Call):
        name = name_of(value.func)
        if name == "int" and len(value.args) == 1:
            return _is_rank(value.args[0])
        is_read = name in ("getenv", *_GETTERS) or (name == "get" and "environ" in ast.unparse(value.func))
        return is_read and bool(_RANK_NAME.search(ast.unparse(value)))
    if isinstance(value, ast.Subscript):
        return "environ" in ast.unparse(value.value) and bool(_RANK_NAME.search(ast.unparse(value.slice)))
    return bool(_RANK_NAME.fullmatch(name_of(value)))


def _tests_rank(value: ast.expr) -> bool:
    """Whether it is a test of the rank, or combines some: what else is computed from a rank may be anything.

    What holds on a rank *or* for another reason does not single out a rank.
    """
    if isinstance(value, ast.BoolOp):
        tests = map(_tests_rank, value.values)
        return all(tests) if isinstance(value.op, ast.Or) else any(tests)
    if isinstance(value, ast.UnaryOp):
        inner = value.operand
        if isinstance(inner, ast.BoolOp):
            tests = map(_tests_rank, inner.values)
            return all(tests) if isinstance(inner.op, ast.And) else any(tests)
        return isinstance(value.op, ast.Not) and bool(RANK_WORDS.search(ast.unparse(value)))
    if isinstance(value, ast.Compare):
        return bool(RANK_WORDS.search(ast.unparse(value)))
    return bool(_TEST_NAME.fullmatch(name_of(value.func if isinstance(value, ast.Call) else value)))


def _tested(test: ast.expr) -> set[str]:
    """The names that a condition tests by themselves: ``main``, ``self.main`` and ``main()``, also negated."""
    if isinstance(test, ast.BoolOp):
        return {name for value in test.values for name in _tested(value)}
    if isinstance(test, ast.UnaryOp):
        return _tested(test.operand)
    return {name_of(test.func if isinstance(test, ast.Call) else test)} - {""}


def _compared(test: ast.expr) -> set[str]:
    """The names that a condition compares with something: ``me == 0``."""
    comparisons = (node for node in ast.walk(test) if isinstance(node, ast.Compare))
    return {name_of(side) for node in comparisons for side in (node.left, *node.comparators)} - {""}
