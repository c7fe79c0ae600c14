"""Values that each process computes for itself, and that a string or path is made of: the time, and ``hash()``."""

import ast
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.source.assignments import Given, only_assignment, variable
from lightning_ncclsafe.probes.source.syntax import is_of_self, name_of

# Not a method of the same name of anything else.
_TIME = frozenset(
    (
        *("time.time", "time.time_ns", "time.strftime", "datetime.now", "datetime.utcnow"),
        *("datetime.datetime.now", "datetime.datetime.utcnow", "dt.datetime.now", "time_ns", "strftime"),
    )
)
# Directives of strftime() finer than a day, which ranks of one job may be on two sides of.
_FINE = ("%H", "%I", "%M", "%S", "%f", "%s", "%X", "%c", "%T", "%R")
# What shows that a value has text in it, which is hashed at random.
_OF_TEXT = frozenset(
    ("str", "repr", "dumps", "items", "join", "format", "lower", "upper", "strip", "encode", "read_text")
)
# What makes a text or a path of what it is given, and of nothing else.
_PASSING = frozenset(
    (
        *("Path", "PurePath", "joinpath", "join", "with_suffix", "with_name", "resolve", "absolute", "expanduser"),
        *("str", "repr", "int", "abs", "round", "hex", "format", "strftime", "isoformat", "replace", "lower", "upper"),
    )
)
_MOST_STEPS = 16


def own_value_in(value: ast.expr, made: Given, owner: type | None) -> Given | None:
    """Where a value is computed that each process has for itself, and of which this expression is made.

    Args:
        value: The expression; variables, and attributes of ``self`` that are set once, are followed.
        made: Where it is.
        owner: The class whose attributes these are; None if it is not known.
    """
    waiting, seen = [(value, made)], set[str]()
    while waiting and len(seen) < _MOST_STEPS:
        expression, given = waiting.pop()
        for part in _parts(expression):
            if isinstance(part, ast.Call):
                if _is_own(part, given):
                    return given
            elif (name := ast.unparse(part)) not in seen:
                seen.add(name)
                held = variable(name, given) if isinstance(part, ast.Name) else _held_by(owner, name_of(part))
                if held is not None and held.value is not None and not (held.is_part or held.is_conditional):
                    waiting.append((held.value, held))
    return None


def hashes_text_alike(start: Path = Path("/proc/self/environ")) -> bool:
    """Whether text has the same hash in all ranks: PYTHONHASHSEED is a number, or they are forked from one process.

    Of the environment, that counts with which this process was started: later values have no effect.
    """
    known = or_none(start.read_bytes) or b""
    return multiprocessing.parent_process() is not None or any(
        one.startswith(b"PYTHONHASHSEED=") and one[15:].isdigit() for one in known.split(b"\0")
    )


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    """The calls, variables and attributes of ``self`` that make up a text, a number or a path."""
    inner: list[ast.expr] = []
    if _is_coarse(value):
        return
    if isinstance(value, ast.JoinedStr):
        inner = [one.value for one in value.values if isinstance(one, ast.FormattedValue)]
    elif isinstance(value, ast.BinOp) and not isinstance(value.op, ast.FloorDiv):
        inner = [value.left, value.right]
    elif isinstance(value, ast.Call) and name_of(value.func) in _PASSING:
        inner = [*value.args, *([value.func.value] if isinstance(value.func, ast.Attribute) else [])]
    if isinstance(value, (ast.Call, ast.Name)) or is_of_self(value):
        yield value
    for one in inner:
        yield from _parts(one)


def _held_by(owner: type | None, name: str) -> Given | None:
    return only_assignment(name, owner) if owner is not None else None


def _is_coarse(value: ast.expr) -> bool:
    """Whether it is a date alone, or a time that is given."""
    if not isinstance(value, ast.Call) or name_of(value.func) != "strftime":
        return False
    form = next(iter(value.args), None)
    is_date = isinstance(form, ast.Constant) and not any(one in str(form.value) for one in _FINE)
    return is_date or len(value.args) != 1


def _is_own(call: ast.Call, made: Given) -> bool:
    """Whether each process has its own result: the time, and the ``hash`` of what shows to have text in it."""
    if ast.unparse(call.func) in _TIME:
        return True
    is_hash = (
        isinstance(call.func, ast.Name) and call.func.id == hash.__name__ and variable(hash.__name__, made) is None
    )
    return is_hash and any(map(_has_text, call.args)) and not hashes_text_alike()


def _has_text(value: ast.expr) -> bool:
    nodes = [*ast.walk(value)]
    calls = (name_of(node.func) for node in nodes if isinstance(node, ast.Call))
    is_text = any(isinstance(node, (ast.Constant, ast.JoinedStr)) and _is_text(node) for node in nodes)
    return is_text or any(name in _OF_TEXT for name in calls)


def _is_text(node: ast.Constant | ast.JoinedStr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node.value, (str, bytes))
