"""What of a checkpoint could not be pickled, and the user's line that has put it there."""

import ast
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, GetSetDescriptorType
from typing import Any, NamedTuple

from lightning_ncclsafe.code.raised import text_of
from lightning_ncclsafe.probes.source.scopes import Scope

_CHECKPOINT = "checkpoint"
"""Lightning's name of the dict that it saves, in the functions that do so."""

# Of what is looked through: state dicts have a level for the callback or module, and some below. What one of many
# values has must not leave out the others.
_MOST_LEVELS, _MOST_VALUES, _MOST_OF_ONE = 6, 5_000, 1_000
_MOST_MESSAGE, _MOST_NAME = 2_000, 80
# A message may have the names of these as words of its own.
_PICKLED = {kind.__name__ for kind in (bool, bytes, complex, dict, float, int, list, object, set, str, tuple)}


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
    message = text_of(error)[:_MOST_MESSAGE]
    # An error of storage may have the word in the name of a file.
    if isinstance(error, OSError) or "pickle" not in message.lower():
        return None
    named = set(re.findall(r"\w+|<lambda>", message)) - _PICKLED
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
    waiting: deque[tuple[tuple[str, ...], Any]] = deque([((), checkpoint)])
    for _ in range(_MOST_VALUES):
        if not waiting:
            return
        path, value = waiting.popleft()
        yield path, value.__name__ if type(value) is FunctionType else type(value).__name__
        if len(path) < _MOST_LEVELS:
            most = min(_MOST_OF_ONE, _MOST_VALUES - len(waiting))
            try:
                waiting += list(itertools.islice(_within(path, value), most))
            except RuntimeError:  # another thread has changed it meanwhile
                continue


def _within(path: tuple[str, ...], value: Any) -> Iterable[tuple[tuple[str, ...], Any]]:
    # Not by methods of the user's classes; isinstance() would ask for an object's __class__.
    if issubclass(type(value), dict):
        return (((*path, _name(key)), one) for key, one in dict.items(value))
    if type(value) in (list, tuple):
        return ((path, one) for one in value)
    return ((path, one) for one in _attributes(value).values()) if path else ()


def _name(key: Any) -> str:
    return str(key)[:_MOST_NAME] if type(key) in (str, int) else type(key).__name__


def _attributes(value: Any) -> Mapping[str, Any]:
    declared = (vars(one).get("__dict__") for one in type(value).__mro__)
    own = next((one for one in declared if type(one) is GetSetDescriptorType), None)
    found = own.__get__(value) if own is not None else None
    return found if type(found) is dict else {}
