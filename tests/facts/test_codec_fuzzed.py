"""Any facts are read back as they were written, and anything else is refused by the codec's one error."""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_codec import JOB, RANK

from lightning_ncclsafe import facts as module
from lightning_ncclsafe.facts import Group, JobFacts, RankFacts
from lightning_ncclsafe.facts.codec import DecodeError, decode, encode, from_plain, to_plain

TYPES = [kind for kind in vars(module).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
# What is sent is UTF-8; of lone surrogates test_codec tells.
TEXT = st.text('aZ0 ."\\\n\x00\x1b\u2028ü😀', max_size=12)
# Numbers at which something overflows, and values that Python's JSON reads and no other's.
ODD = st.sampled_from(
    [-1, 0, 1, 2**31, 2**63, -(2**64), 10**400, 1.0, -0.0, 1e308, float("nan"), float("inf"), "", "0", "\ud800"]
)
JSON = st.recursive(
    st.none() | st.booleans() | ODD | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
QUICK = settings(
    derandomize=True, database=None, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type that facts are made of."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(values, arguments))
    if origin is tuple:
        return st.lists(st.deferred(lambda: values(arguments[0])), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, values(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(kind):
        return st.builds(kind, **{name: values(hint) for name, hint in typing.get_type_hints(kind).items()})
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    plain: Mapping[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers() | st.sampled_from([2**63, -(2**70)]),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: TEXT,
        type(None): st.none(),
    }
    return plain[kind]


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in (JobFacts, RankFacts)])
@settings(QUICK, max_examples=3)
@given(data=st.data())
def test_any_facts_round_trip(kind: type, data: st.DataObject) -> None:
    made = data.draw(values(kind))
    assert decode(kind, encode(made)) == made
    assert from_plain(kind, to_plain(made)) == made


@QUICK
@given(
    start=st.integers(-100, 2**40),
    step=st.integers(-9, 9),
    count=st.integers(0, 200),
    last=st.lists(st.integers(), max_size=1),
)
def test_any_members_round_trip(start: int, step: int, count: int, last: list[int]) -> None:
    group = Group(name="0", ranks=(*(start + step * number for number in range(count)), *last))
    assert decode(Group, encode(group)) == group


def places(plain: Any) -> list[tuple[Any, ...]]:
    """The way to each value in plain data."""
    inner = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    return [(), *((key, *below) for key, value in inner for below in places(value))]


def replaced(plain: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy with another value at one place."""
    if not place:
        return change(plain)
    copy = plain.copy()
    copy[place[0]] = replaced(plain[place[0]], place[1:], change)
    return copy


def tables(value: Any) -> list[tuple[Any, ...]]:
    """The way to each dataclass in facts, whose fields are known."""
    if isinstance(value, tuple):
        return [(number, *below) for number, item in enumerate(value) for below in tables(item)]
    if not dataclasses.is_dataclass(value):
        return []
    names = [field.name for field in dataclasses.fields(value)]
    return [(), *((name, *below) for name in names for below in tables(getattr(value, name)))]


PLAIN = json.loads(encode(JOB))
PLACES, TABLES = places(PLAIN), tables(JOB)


def check(kind: type, data: bytes) -> None:
    try:
        read = decode(kind, data)
    except DecodeError as error:
        assert str(error).startswith(kind.__name__) and len(str(error)) < 400
    else:
        written = encode(read)
        assert encode(decode(kind, written)) == written


NUMBERS = st.integers(-3, 70) | st.sampled_from([2**20, 2**62, 2**63, 10**30, -(10**30)])


@QUICK
@given(found=st.tuples(NUMBERS, NUMBERS, st.integers(-2, 2)) | st.lists(NUMBERS | JSON, max_size=4))
def test_any_range_of_members_is_read_or_refused(found: Sequence[Any]) -> None:
    check(Group, json.dumps({"name": "0", "ranks": {"range": found}}).encode())


@settings(QUICK, max_examples=80)
@given(place=st.sampled_from(PLACES), wrong=JSON)
def test_a_wrong_value_at_any_place_is_read_or_refused(place: tuple[Any, ...], wrong: Any) -> None:
    check(JobFacts, json.dumps(replaced(PLAIN, place, lambda value: wrong)).encode())


@settings(QUICK, max_examples=50)
@given(place=st.sampled_from(TABLES), key=TEXT, value=JSON)
def test_unknown_fields_are_ignored(place: tuple[Any, ...], key: str, value: Any) -> None:
    newer = replaced(PLAIN, place, lambda table: {**table, f"newer {key}": value})
    assert decode(JobFacts, json.dumps(newer).encode()) == JOB


BYTES = encode(RANK)
EDITS = st.lists(
    st.tuples(
        st.integers(0, len(BYTES)), st.integers(0, 20), st.binary(max_size=8) | st.sampled_from([b'"', b"]", b"1e9"])
    ),
    min_size=1,
    max_size=3,
)


@settings(QUICK, max_examples=80)
@given(edits=EDITS, kept=st.integers(0, len(BYTES)) | st.none())
def test_damaged_bytes_are_read_or_refused(edits: list[tuple[int, int, bytes]], kept: int | None) -> None:
    data = BYTES
    for place, cut, put in edits:
        data = data[:place] + put + data[place + cut :]
    check(RankFacts, data[:kept])
