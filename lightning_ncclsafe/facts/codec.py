"""Converts dataclasses to JSON and back, strictly: what is read is checked against the types, never trusted.

In a large job, one rank reads the facts of all: so everything about a type is worked out only once, and equal small
parts are one object in memory.
"""

import dataclasses
import json
import math
import reprlib
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Reader = Callable[[Any], Any]

# Metadata of a field of whole numbers: it is written as a range if it is long and has equal steps.
_RANGES = "ranges"
# Shorter lists stay as they are, for people who read them.
_LEAST_RANGE = 64
_LONGEST_RANGE = 1 << 17
# The most members of all ranges in one text: otherwise a few bytes could ask for any number of them.
_MOST_MEMBERS = 1 << 23
# Names, paths, shapes and frames are the same on most ranks; at most this many different ones are shared.
_SHARED = 4096
_SHORT = 200
_ABSENT = object()


class DecodeError(ValueError):
    """The data does not fit its type; the message names the place, what was found and what was expected."""


class _Unfit(Exception):
    """What was found, and the place, from the inside out."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.place: list[str] = []


def encode(value: Any) -> bytes:
    """The JSON text of a dataclass (or of anything JSON holds), as UTF-8."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=_plain)
    return text.encode("utf-8", "replace")


def to_plain(value: Any) -> Any:
    """A dataclass (or anything JSON holds) as dictionaries, lists, numbers and texts: what its JSON text contains."""
    return json.loads(json.dumps(value, default=_plain))


def decode(cls: type[T], data: bytes) -> T:
    """Reads a dataclass from JSON text.

    Fields that ``cls`` does not know are ignored, so that a newer writer can be read; missing ones take their default.

    Raises:
        DecodeError: If the text is not JSON or does not fit the types of ``cls``.
    """
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{cls.__name__}: expected JSON, found {bytes(data[:40])!r} ({error}).") from error
    return from_plain(cls, plain)


def from_plain(cls: type[T], plain: Any) -> T:
    """Builds a dataclass from plain data; see :func:`decode`."""
    _left.members = _MOST_MEMBERS
    try:
        read: Reader = _reader(typing.cast(Any, cls))
        return typing.cast(T, read(plain))
    except _Unfit as error:
        place = "".join([cls.__name__, *reversed(error.place)])
        raise DecodeError(f"{place}: {error}") from error


class _Written(NamedTuple):
    """How instances of a dataclass are written: the names of its fields, their getter, and which are ranges."""

    names: tuple[str, ...]
    values: Callable[[Any], Any]
    ranges: tuple[str, ...]


@cache
def _written(cls: type) -> _Written:
    fields = dataclasses.fields(cls)
    names = tuple(field.name for field in fields)
    # For a single name it would return the value alone.
    values = attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
    return _Written(names, values, tuple(field.name for field in fields if field.metadata.get(_RANGES)))


def _plain(value: Any) -> Any:
    """Converts what ``json`` cannot write, one level deep: ``json`` calls it again for the contents."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} is neither a dataclass nor anything that JSON holds")
    written = _written(type(value))
    plain = dict(zip(written.names, written.values(value), strict=True))
    for name in written.ranges:
        plain[name] = _as_range(plain[name])
    return plain


def _as_range(numbers: tuple[int, ...]) -> tuple[int, ...] | dict[str, list[int]]:
    """``{"range": [0, 1024, 1]}``, start, stop and step, for ranks that would fill pages; short lists as they are."""
    if not _LEAST_RANGE <= len(numbers) <= _LONGEST_RANGE or (step := numbers[1] - numbers[0]) == 0:
        return numbers
    # First by the last one: a range with an odd last number could be endless.
    if numbers[-1] != numbers[0] + step * (len(numbers) - 1):
        return numbers
    stop = numbers[-1] + (1 if step > 0 else -1)
    return {"range": [numbers[0], stop, step]} if numbers == tuple(range(numbers[0], stop, step)) else numbers


@cache
def _reader(kind: Any) -> Reader:
    """What reads plain data as this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(argument for argument in arguments if argument is not type(None)))
        return lambda value: None if value is None else inner(value)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin is tuple:
        return _tuple_reader(arguments[0])
    if origin is dict:
        return _dict_reader(arguments[1])
    return _value_reader(kind)


def _value_reader(kind: Any) -> Reader:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_reader(kind)
    if kind is float:
        return _read_float
    return _read_text if kind is str else lambda value: _expect(kind, value)


def _dataclass_reader(cls: Any) -> Reader:
    fields: list[tuple[str, Any, Reader]] = []

    def read(value: Any) -> Any:
        plain = _expect(dict, value)
        if not fields:  # now, as a type may be recursive
            fields.extend(_field_readers(cls))
        known = {}
        for name, kind, read_field in fields:
            found = plain.get(name, _ABSENT)
            # Most are numbers; avoiding a call matters here.
            if type(found) is kind:
                known[name] = found
            elif found is not _ABSENT:
                known[name] = _inside(read_field, found, name)
        try:
            return cls(**known)
        except TypeError as error:
            raise _Unfit(f"{error}.") from error

    return read


def _field_readers(cls: Any) -> Iterator[tuple[str, Any, Reader]]:
    """Name and reader of each field, and between them the type that needs no reading where it is found."""
    ranges = _written(cls).ranges
    for name, hint in typing.get_type_hints(cls).items():
        yield name, hint if hint in (int, bool) else None, _read_ranks if name in ranges else _reader(hint)


def _inside(read: Reader, value: Any, name: str) -> Any:
    try:
        return read(value)
    except _Unfit as error:
        error.place.append(f".{name}")
        raise


def _tuple_reader(kind: Any) -> Reader:
    read_item = _reader(kind)
    # Shapes and names: comparable and small.
    share = _sharing() if _is_small(kind) else None

    def read(value: Any) -> Any:
        given, items = _expect(list, value), []
        try:
            for item in given:
                items.append(read_item(item))
        except _Unfit as error:
            error.place.append(f"[{len(items)}]")
            raise
        return share(tuple(items)) if share is not None and len(items) <= _SHORT else tuple(items)

    return read


def _is_small(kind: Any) -> bool:
    """Whether this is a number, a text, or a tuple of such."""
    return kind in (int, str) or (typing.get_origin(kind) is tuple and _is_small(typing.get_args(kind)[0]))


def _dict_reader(kind: Any) -> Reader:
    read_item = _reader(kind)

    def read(value: Any) -> Any:
        found = {}
        for key, item in _expect(dict, value).items():
            try:
                found[_shared_text(key) if len(key) <= _SHORT else key] = read_item(item)
            except _Unfit as error:
                error.place.append(f"[{key!r}]")
                raise
        return found

    return read


def _enum_reader(kind: type[Enum]) -> Reader:
    def read(value: Any) -> Enum:
        try:
            return kind(value)
        except ValueError as error:
            allowed = ", ".join(repr(member.value) for member in kind)
            raise _Unfit(f"found {_shown(value)}, expected one of {allowed}.") from error

    return read


def _sharing() -> Callable[[Any], Any]:
    """Returns, of equal values, always the first; separately by type, as 1 equals True."""
    return lru_cache(maxsize=_SHARED)(lambda value: value)


_shared_text = _sharing()


def _read_text(value: Any) -> str:
    text: str = _expect(str, value)
    return _shared_text(text) if len(text) <= _SHORT else text


def _read_float(value: Any) -> float:
    """JSON writes 1.0 as 1, and Python's reads NaN, Infinity and 1e999, none of which is a measurement."""
    number = value if type(value) is int else _expect(float, value)
    try:
        if math.isfinite(number):
            return float(number)
    except OverflowError:
        pass
    raise _Unfit(f"found {_shown(value)}, expected a finite float.")


class _MembersLeft(threading.local):
    """How many members of ranges may still be read, on this thread."""

    members = _MOST_MEMBERS


_left = _MembersLeft()


def _read_ranks(value: Any) -> tuple[int, ...]:
    if type(value) is not dict:
        return _reader(tuple[int, ...])(value)  # type: ignore[no-any-return]
    match value.get("range"):
        # Not by the length of the range, which Python limits to a machine word.
        case [int() as start, int() as stop, int() as step] if step and (stop - start) // step <= _LONGEST_RANGE:
            return _numbers(int(start), int(stop), int(step))
    raise _Unfit(f"found {_shown(value)}, expected list.")


@lru_cache(maxsize=256)
def _numbers(start: int, stop: int, step: int) -> tuple[int, ...]:
    """Each rank of a group of a thousand lists its members; in memory these are one tuple."""
    numbers = range(start, stop, step)
    _left.members -= len(numbers)
    if _left.members < 0:
        raise _Unfit(f"found ranges of more than {_MOST_MEMBERS:,} members in all, expected fewer.")
    return tuple(numbers)


def _expect(kind: type, value: Any) -> Any:
    # JSON yields exactly these types; a bool is no int.
    if type(value) is not kind:
        raise _Unfit(f"found {_shown(value)}, expected {kind.__name__}.")
    return value


def _shown(value: Any) -> str:
    """A short text of what was found: ``repr`` of something deeply nested would overflow the stack."""
    return f"{reprlib.repr(value):.60}"
