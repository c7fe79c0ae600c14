"""Values that each process computes for itself, and that a string or path is made of: the time, and ``hash()``."""

import ast
from collections.abc import Iterator
from pathlib import Path

from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.source.assignments import Given, only_assignment, variable
from lightning_ncclsafe.probes.source.syntax import is_any_constant, is_of_self, name_of

_TIME = frozenset(("time", "time_ns", "strftime", "now", "utcnow"))
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
    """Whether text has the same hash in all processes, as PYTHONHASHSEED was a number when this one was started.

    Later values have no effect.
    """
    known = or_none(start.read_bytes) or b""
    return any(one.startswith(b"PYTHONHASHSEED=") and one[15:].isdigit() for one in known.split(b"\0"))


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    """The calls, variables and attributes of ``self`` that make up a text, a number or a path."""
    inner: list[ast.expr] = []
    if isinstance(value, ast.JoinedStr):
        inner = [one.value for one in value.values if isinstance(one, ast.FormattedValue)]
    elif isinstance(value, ast.BinOp):
        inner = [value.left, value.right]
    elif isinstance(value, ast.Call) and name_of(value.func) in _PASSING:
        inner = [*value.args, *([value.func.value] if isinstance(value.func, ast.Attribute) else [])]
    if isinstance(value, (ast.Call, ast.Name)) or is_of_self(value):
        yield value
    for one in inner:
        yield from _parts(one)


def _held_by(owner: type | None, name: str) -> Given | None:
    return only_assignment(name, owner) if owner is not None else None


def _is_own(call: ast.Call, made: Given) -> bool:
    """Whether each process has its own result, of ``hash`` if it is of more than numbers."""
    if name_of(call.func) in _TIME:
        return not any(isinstance(node, ast.Call) and name_of(node.func) == "fromtimestamp" for node in ast.walk(call))
    is_hash = (
        isinstance(call.func, ast.Name) and call.func.id == hash.__name__ and variable(hash.__name__, made) is None
    )
    return is_hash and not all(map(_is_number, call.args)) and not hashes_text_alike()


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, (ast.Tuple, ast.List)):
        return all(map(_is_number, value.elts))
    return is_any_constant(value) and not isinstance(getattr(value, "value", None), (str, bytes))
