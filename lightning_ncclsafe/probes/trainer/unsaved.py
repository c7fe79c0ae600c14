"""What of a checkpoint could not be pickled, and the user's line that has put it there."""

import ast
import re
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from lightning_ncclsafe.probes.source.scopes import Scope

_CHECKPOINT = "checkpoint"
"""Lightning's name of the dict that it saves, in the functions that do so."""

# Of what is looked through: state dicts have a level for the callback or module, and some below.
_MOST_LEVELS, _MOST_VALUES = 6, 5_000


class Unsaved(NamedTuple):
    """An entry of a checkpoint.

    Attributes:
        key: The innermost name that leads to it.
        words: ``"checkpoint['older'] (DataLoaderIter)"``.
    """

    key: str
    words: str


def unsaved(error: BaseException) -> Unsaved | None:
    """The entry whose class an error of pickle names; None for any other error, or if no entry has such a class."""
    message = str(error)
    if "pickle" not in message.lower():
        return None
    named = set(re.findall(r"\w+|<lambda>", message))
    for path, kind in _entries(_checkpoint(error)):
        if path and kind in named:
            return Unsaved(path[-1], f"{_CHECKPOINT}{''.join(f'[{key!r}]' for key in path)} ({kind})")
    return None


def kept_at(key: str, scope: Scope) -> Iterator[str]:
    """The lines of a function that give a dict this key."""
    for node in scope.nodes:
        if isinstance(node, ast.Assign):
            targets = [one for one in node.targets if isinstance(one, ast.Subscript)]
            if any(_is_key(target.slice, key) for target in targets):
                yield scope.place(node.lineno)
        elif isinstance(node, ast.Dict):
            yield from (scope.place(one.lineno) for one in node.keys if one is not None and _is_key(one, key))


def _is_key(node: ast.expr, key: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == key


def _checkpoint(error: BaseException) -> Mapping[Any, Any]:
    trace = error.__traceback__
    while trace is not None:
        found = trace.tb_frame.f_locals.get(_CHECKPOINT)
        if isinstance(found, dict):
            return found
        trace = trace.tb_next
    return {}


def _entries(checkpoint: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Values with the names that lead to them, and of what class, or which function, each is."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), checkpoint)]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return
        path, value = waiting.pop(0)
        yield path, value.__name__ if isinstance(value, FunctionType) else type(value).__name__
        if len(path) == _MOST_LEVELS:
            continue
        # Not by methods of the user's classes.
        if isinstance(value, dict):
            waiting += [((*path, str(key)), one) for key, one in dict.items(value)]
        elif type(value) in (list, tuple):
            waiting += [(path, one) for one in value]
        elif isinstance(attributes := getattr(value, "__dict__", None), dict) and path:
            waiting += [(path, one) for one in attributes.values()]
