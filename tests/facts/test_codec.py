"""Facts that cross from rank to rank: what is written is read back, and what does not fit is refused by its place."""

import dataclasses
import itertools
import json
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from lightning_ncclsafe.facts import (
    Action,
    Collective,
    ExceptionFacts,
    Group,
    HostFacts,
    JobFacts,
    Phase,
    Progress,
    RankFacts,
    codec,
)
from lightning_ncclsafe.facts.codec import DecodeError, decode, encode

NUMBERS = itertools.count(1000)


def full(kind: Any) -> Any:
    """A value of a type that facts are made of: no field has its default, and no two numbers or texts are equal."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return full(arguments[0])
    if origin is tuple:
        return (full(arguments[0]),)
    if origin is dict:
        return {full(str): full(arguments[1])}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        flags = {field.name: field.default is not True for field in dataclasses.fields(kind)}
        return kind(**{name: flags[name] if hint is bool else full(hint) for name, hint in hints.items()})  # type: ignore[operator]
    if issubclass(kind, Enum):
        return [*kind][-1]
    number = next(NUMBERS)
    return {bool: True, int: number, float: number + 0.5, str: f"text {number}"}[kind]


JOB: JobFacts = full(JobFacts)
RANK = JOB.ranks[0]


def unset(value: Any, place: str = "JobFacts") -> Iterator[str]:
    """Fields that were left at their default, and so would not be missed."""
    if isinstance(value, tuple):
        for item in value:
            yield from unset(item, place)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if inner in (field.default, None, (), {}):
                yield f"{place}.{field.name}"
            yield from unset(inner, f"{place}.{field.name}")


def test_the_test_facts_fill_every_field() -> None:
    assert list(unset(JOB)) == []


def test_encoding_round_trips() -> None:
    assert decode(JobFacts, encode(JOB)) == JOB


def test_integers_are_read_as_float_seconds() -> None:
    action = decode(Action, b'{"name": "fit", "for_s": 3}')
    assert (action.for_s, type(action.for_s)) == (3.0, float)


def test_unknown_fields_are_ignored_at_every_depth() -> None:
    plain = json.loads(encode(JOB))
    plain["colour"] = plain["incident"]["colour"] = plain["ranks"][0]["stack"][0]["colour"] = ["blue"]
    assert decode(JobFacts, json.dumps(plain).encode()) == JOB


def test_missing_fields_take_their_defaults() -> None:
    facts = decode(RankFacts, b'{"rank": 1, "progress": {"phase": "init"}}')
    assert facts == RankFacts(rank=1, progress=Progress(phase=Phase.INIT))


def test_null_is_accepted_where_allowed() -> None:
    assert decode(HostFacts, b'{"rss_bytes": null, "cores": 2}') == HostFacts(cores=2)


def at_rank(**changes: Any) -> bytes:
    return json.dumps({"rank": 0, "progress": {"phase": "train"}, **changes}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "RankFacts: expected JSON, found b''"),
        (encode(RANK)[:-9], f'RankFacts: expected JSON, found b\'{{"rank":{RANK.rank},'),
        (b"\xff\xfe{}", "RankFacts: expected JSON"),
        (b"[" * 200_000, "RankFacts: expected JSON"),
        (b"1" * 5_000, "RankFacts: expected JSON"),
        (b"[]", "RankFacts: found [], expected dict."),
        (b"null", "RankFacts: found None, expected dict."),
        (b"{}", "RankFacts: "),
        (b'{"rank": 0}', "missing 1 required keyword-only argument: 'progress'"),
        (at_rank(rank="0"), "RankFacts.rank: found '0', expected int."),
        (at_rank(rank=None), "RankFacts.rank: found None, expected int."),
        (at_rank(rank=True), "RankFacts.rank: found True, expected int."),
        (at_rank(rank=1.0), "RankFacts.rank: found 1.0, expected int."),
        (at_rank(rank=float("nan")), "RankFacts.rank: found nan, expected int."),
        (at_rank(host=["a"]), "RankFacts.host: found ['a'], expected str."),
        (at_rank(progress={}), "RankFacts.progress: "),
        (at_rank(progress={"phase": "lunch"}), "RankFacts.progress.phase: found 'lunch', expected one of 'init', "),
        (at_rank(progress={"phase": {}}), "RankFacts.progress.phase: found {}, expected one of"),
        (
            at_rank(progress={"phase": "train", "idle_s": True}),
            "RankFacts.progress.idle_s: found True, expected float.",
        ),
        (at_rank(progress={"phase": "train", "is_last_batch": 1}), "is_last_batch: found 1, expected bool."),
        (at_rank(groups=[{"name": "0"}, 5]), "RankFacts.groups[1]: found 5, expected dict."),
        (at_rank(groups=[{"name": "0", "ranks": [0, "1"]}]), "RankFacts.groups[0].ranks[1]: found '1', expected int."),
        (at_rank(groups={"0": 1}), "RankFacts.groups: found {'0': 1}, expected list."),
        (at_rank(versions={"torch": 2}), "RankFacts.versions['torch']: found 2, expected str."),
        (at_rank(versions=[]), "RankFacts.versions: found [], expected dict."),
        (at_rank(exception="ValueError"), "RankFacts.exception: found 'ValueError', expected dict."),
        (at_rank(host_facts={"load_1min": "high"}), "RankFacts.host_facts.load_1min: found 'high', expected float."),
    ],
)
def test_a_type_error_names_its_place(data: bytes, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(RankFacts, data)
    assert said in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_duration_must_be_finite(number: str) -> None:
    with pytest.raises(DecodeError, match=r"Action\.for_s: found .+, expected a finite float"):
        decode(Action, f'{{"name": "fit", "for_s": {number}}}'.encode())


def test_no_depth_of_nesting_overflows_the_stack() -> None:
    """Where JSON is just readable, building the error message must not fail in turn."""
    limit = sys.getrecursionlimit()
    for depth in range(limit - 300, limit + 1):
        with pytest.raises(DecodeError):
            decode(Action, b'{"for_s": 0, "name": ' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize(
    "data",
    [at_rank(host=[0] * 100_000), at_rank(rank="x" * 100_000), at_rank(progress={"phase": "x" * 100_000})],
)
def test_an_error_is_always_short(data: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(RankFacts, data)
    assert len(str(caught.value)) < 300


def test_an_undecodable_message_can_be_encoded() -> None:
    # Of a file name whose bytes are not UTF-8, Python makes a string with lone surrogates.
    undecodable = b"/data/\xff\xfe.py".decode("utf-8", "surrogateescape")
    facts = ExceptionFacts(type="OSError", message=undecodable + " \ud800 \x00 \U0001f600 \x1b[31m")
    sent = encode(facts)
    assert sent.decode("utf-8")
    assert decode(ExceptionFacts, sent).message == "/data/??.py ? \x00 \U0001f600 \x1b[31m"


def test_a_decoded_surrogate_can_be_encoded() -> None:
    facts = decode(ExceptionFacts, b'{"type": "E", "message": "\\ud800"}')
    assert decode(ExceptionFacts, encode(facts)).message == "?"


def test_types_in_either_notation_are_read() -> None:
    from typing import Optional

    @dataclass(frozen=True, kw_only=True)
    class Both:
        old: Optional[int] = 0  # noqa: UP045 - as typing writes it
        new: int | None = 0

    assert decode(Both, b'{"old": null, "new": null}') == Both(old=None, new=None)


@pytest.mark.parametrize(
    ("ranks", "written"),
    [
        (tuple(range(1024)), {"range": [0, 1024, 1]}),
        (tuple(range(3, 1024, 8)), {"range": [3, 1020, 8]}),
        (tuple(range(100, 0, -1)), {"range": [100, 0, -1]}),
        (tuple(range(63)), [*range(63)]),
        ((*range(63), 99), [*range(63), 99]),
        ((7,) * 64, [7] * 64),
        ((*range(64), 2**62), [*range(64), 2**62]),
    ],
    ids=["all", "every eighth", "downwards", "few", "uneven", "equal", "an odd last one"],
)
def test_large_groups_are_written_as_a_range(ranks: tuple[int, ...], written: object) -> None:
    group = Group(name="0", ranks=ranks)
    assert json.loads(encode(group))["ranks"] == written
    assert decode(Group, encode(group)) == group


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {"range": [0, 5]},
        {"range": [0, 5, 0]},
        {"range": [0, 1 << 40, 1]},
        {"range": [0, 10**30, 1]},
        {"range": [0, -(10**30), -1]},
        {"range": ["0", 5, 1]},
        {"range": 5},
    ],
    ids=["empty", "no step", "step of 0", "too long", "longer", "downwards", "no number", "no list"],
)
def test_an_invalid_range_is_refused(ranks: object) -> None:
    with pytest.raises(DecodeError, match=r"^Group\.ranks: found .*, expected list\.$"):
        decode(Group, json.dumps({"name": "0", "ranks": ranks}).encode())


def test_the_total_size_of_ranges_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """About 20 bytes stand for a hundred thousand numbers, and a file may contain millions of ranges."""
    monkeypatch.setattr(codec, "_MOST_MEMBERS", 1000)
    plain = json.loads(encode(RANK))

    def read(first: int, count: int) -> RankFacts:
        groups = [{"name": "dp", "ranks": {"range": [n, n + 100, 1]}} for n in range(first, first + count)]
        return decode(RankFacts, json.dumps(plain | {"groups": groups}).encode())

    assert len(read(7_000_000, 10).groups) == 10
    with pytest.raises(DecodeError, match=r"ranks: found ranges of more than 1,000 members in all"):
        read(8_000_000, 11)


def test_only_group_members_may_be_a_range() -> None:
    plain = json.loads(encode(JOB))
    plain["ranks"][0]["collectives"][0]["input_sizes"] = [{"range": [0, 9, 1]}]
    with pytest.raises(DecodeError, match=r"input_sizes\[0\]: found .*, expected list"):
        decode(JobFacts, json.dumps(plain).encode())


def test_equal_values_of_many_ranks_share_one_object() -> None:
    wide = Group(name="dp", ranks=tuple(range(4096)))
    first, second = (decode(RankFacts, encode(dataclasses.replace(RANK, groups=(wide,)))) for _ in range(2))
    assert first == second
    assert first.groups[0].ranks is second.groups[0].ranks
    assert first.host is second.host
    assert first.collectives[0].input_sizes is second.collectives[0].input_sizes


def test_equal_values_of_different_types_are_kept_apart() -> None:
    numbers = decode(Group, b'{"name": "0", "ranks": [0, 1]}').ranks
    assert [type(number) for number in numbers] == [int, int]
    assert decode(Collective, b'{"group": "0", "seq": 1, "op": "x", "completed": true}').completed is True
