"""Dataclasses to JSON and back, strictly: what is read is checked against the types, never trusted."""

import dataclasses
import json
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class DecodeError(ValueError):
    """The data is not what its type says; the message names the place, what was found and what was expected."""


def encode(value: Any) -> bytes:
    """The JSON text of a dataclass (or of anything JSON holds), as UTF-8."""
    return json.dumps(to_plain(value), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def to_plain(value: Any) -> Any:
    """Dataclasses to dictionaries, enums to their values, tuples to lists; everything else unchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


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
    return typing.cast(T, _build(cls, plain, cls.__name__))


def _build(kind: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _build(next(a for a in arguments if a is not type(None)), value, place)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, place)
    if origin is tuple:
        items = _expect(list, value, place)
        return tuple(_build(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(items))
    if origin is dict:
        pairs = _expect(dict, value, place)
        return {key: _build(arguments[1], item, f"{place}[{key!r}]") for key, item in pairs.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _build_enum(kind, value, place)
    if kind is float:
        return _build_float(value, place)
    return _expect(kind, value, place)


def _build_dataclass(cls: Any, value: Any, place: str) -> Any:
    plain = _expect(dict, value, place)
    hints = _hints(cls)
    known = {name: _build(hints[name], plain[name], f"{place}.{name}") for name in hints if name in plain}
    try:
        return cls(**known)
    except TypeError as error:
        raise DecodeError(f"{place}: {error}.") from error


def _build_float(value: Any, place: str) -> float:
    """JSON writes 1.0 as 1, and Python's reads NaN, Infinity and 1e999, none of which is a measurement."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else _expect(float, value, place)
    try:
        if math.isfinite(number):
            return float(number)
    except OverflowError:
        pass
    raise DecodeError(f"{place}: found {_shown(value)}, expected a finite float.")


def _build_enum(kind: type[Enum], value: Any, place: str) -> Enum:
    try:
        return kind(value)
    except ValueError as error:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise DecodeError(f"{place}: found {_shown(value)}, expected one of {allowed}.") from error


def _expect(kind: type, value: Any, place: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise DecodeError(f"{place}: found {_shown(value)}, expected {kind.__name__}.")
    return value


def _shown(value: Any) -> str:
    """What was found, short whatever it is: ``repr`` of something nested deeply would overflow the stack."""
    return f"{reprlib.repr(value):.60}"


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)
