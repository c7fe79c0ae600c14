"""Lines of the user's source that give a process group, the store or a barrier a timeout. Nothing is executed."""

import ast
import itertools
import operator
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning_ncclsafe.facts import Limited, TimeoutLine
from lightning_ncclsafe.probes.process.stacks import main_thread_frames
from lightning_ncclsafe.probes.source.scopes import MOST_PLACES, Scope, scope_of, scopes_in, scopes_of, user_files
from lightning_ncclsafe.probes.source.syntax import name_of, source_text

# All ranks wait while one reads the source.
_MOST_FILES = 8
_GROUP, _STORE = (Limited.GROUP,), (Limited.STORE,)
_BOTH = (*_GROUP, *_STORE)
# torch's functions with a timeout: its position among their arguments, None where it is always named; what it limits.
_FUNCTIONS: dict[str, tuple[int | None, tuple[Limited, ...]]] = {
    "init_process_group": (2, _BOTH),
    "new_group": (1, _GROUP),
    "new_subgroups": (2, _GROUP),
    "new_subgroups_by_enumeration": (1, _GROUP),
    "split_group": (2, _GROUP),
    "init_device_mesh": (None, _GROUP),
    "DeviceMesh": (None, _GROUP),
    "_set_pg_timeout": (0, _GROUP),
    "_set_default_timeout": (0, _GROUP),
    "monitored_barrier": (1, (Limited.BARRIER,)),
    "TCPStore": (4, _STORE),
    "set_timeout": (0, _STORE),
    # Of the store, or of a collective.
    "wait": (1, _BOTH),
}
# Others have functions of these names, too: these count only with a timeout that is written out.
_AMBIGUOUS = ("set_timeout", "wait")
# The parameters of ``timedelta`` in their order.
_UNITS = ("days", "seconds", "microseconds", "milliseconds", "minutes", "hours", "weeks")
_OPERATORS = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.Div: operator.truediv}


def timeout_lines(owners: Iterable[Any]) -> tuple[TimeoutLine, ...]:
    """The lines in the user's functions that the main thread is in and in those of these objects, the first few.

    If there are none, it is those in the rest of their files, or else in the user's other modules, but only where the
    timeout is written out.

    Args:
        owners: The module, the data, the callbacks, the strategy.
    """
    entered = (scope_of(frame.f_code) for frame in main_thread_frames())
    near = [*(scope for scope in entered if scope.file), *scopes_in(owners)]
    found = [*_lines(near)]
    found = found or _written_out(scope.file for scope in near) or _written_out(filter(_is_source, user_files()))
    return tuple(itertools.islice(dict.fromkeys(found), MOST_PLACES))


def _written_out(files: Iterable[str]) -> list[TimeoutLine]:
    with_any = (file for file in dict.fromkeys(files) if _sets_any(source_text(file)))
    found = (line for file in itertools.islice(with_any, _MOST_FILES) for line in _lines(scopes_of(file)))
    return [line for line in found if line.timeout_ms]


def _sets_any(source: str) -> bool:
    """Whether a source text may give one of these functions a timeout; most do not, and are not parsed."""
    return "timeout" in source and any(name in source for name in _FUNCTIONS if name not in _AMBIGUOUS)


def _is_source(file: str) -> bool:
    return file.endswith(".py")


def _lines(scopes: Iterable[Scope]) -> Iterator[TimeoutLine]:
    calls = ((scope, call) for scope in scopes for call in scope.calls(_FUNCTIONS))
    for scope, call in calls:
        name = name_of(call.func)
        position, limits = _FUNCTIONS[name]
        for value in _timeouts(call, position):
            timeout_ms = _milliseconds(value)
            if timeout_ms or name not in _AMBIGUOUS:
                place = scope.place(call.lineno)
                yield TimeoutLine(place=place, call=name, limits=limits, timeout_ms=timeout_ms)


def _timeouts(call: ast.Call, position: int | None) -> Iterator[ast.expr]:
    """The timeout that a call is given, also within its options; none if it is given none."""
    keywords = (node for node in ast.walk(call) if isinstance(node, ast.keyword))
    named = [one.value for one in keywords if one.arg in ("timeout", "_timeout")]
    is_plain = not any(isinstance(one, ast.Starred) for one in call.args)
    if not named and position is not None and is_plain and len(call.args) > position:
        named = [call.args[position]]
    yield from (value for value in named[:1] if not isinstance(value, ast.Constant))


def _milliseconds(value: ast.expr) -> int:
    """A ``timedelta`` that is written out, in milliseconds; 0 for any other expression."""
    if isinstance(value, ast.Call) and name_of(value.func) == timedelta.__name__:
        with suppress(ValueError, TypeError, OverflowError, ZeroDivisionError, RecursionError):
            given = dict(zip(_UNITS, map(_number, value.args), strict=False))
            given |= {one.arg or "": _number(one.value) for one in value.keywords}
            return round(timedelta(**given) / timedelta(milliseconds=1))
    return 0


def _number(value: ast.expr) -> float:
    """The value of an expression of numbers; ValueError for any other."""
    if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
        return value.value
    if isinstance(value, ast.BinOp) and type(value.op) in _OPERATORS:
        return float(_OPERATORS[type(value.op)](_number(value.left), _number(value.right)))
    raise ValueError(ast.dump(value))
