"""Windows as bytes and back; whatever else is read is refused, and nothing in it is run."""

import io
import json
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest
from timing_builders import MS, call, known, window

from lightning_ncclsafe.timing.windows import (
    CALL,
    OWN,
    SPAN,
    Clock,
    GroupMembers,
    OpTotal,
    Window,
    WindowError,
    decode,
    empty_window,
    encode,
    joined,
)

A, B = GroupMembers(name="0", description="default_pg", ranks=(0, 1), backend="gloo"), GroupMembers(name="mine")


def full() -> Window:
    return window(
        [call(0, 1, 1_700_000_000_123_456_789), call(0, 2, 5, group=1, op=1, duration_ns=7)],
        spans=[(0, 3, 1_700_000_000_123_456_000), (0, 1, 9)],
        own=np.array([(1, 1_700_000_000_123_456_000, 1_700_000_000_123_999_000)], OWN),
        groups=[A, B],
        ops=["all_reduce", "_allgather_base"],
        clocks={0: Clock(), 1: Clock(offset_ns=-5, uncertainty_ns=3)},
        totals={0: (OpTotal(group="0", op="all_reduce", count=3, size_bytes=12, duration_ns=9, timed=1),)},
        lost={0: 4},
        left_out={1: 5},
        last=frozenset([1]),
        missing=("Rank 0: the «recorder» is off.",),
    )


def assert_same(first: Window, second: Window) -> None:
    for name in Window.__dataclass_fields__:
        one, other = getattr(first, name), getattr(second, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and one.tolist() == other.tolist()
        else:
            assert one == other, name


@pytest.mark.parametrize("given", [full(), empty_window()], ids=["full", "empty"])
def test_a_window_round_trips(given: Window) -> None:
    assert_same(decode(encode(given)), given)


def test_a_window_of_500_steps_takes_a_few_kilobytes() -> None:
    rows = [call(0, seq, 1_700_000_000_000_000_000 + seq * MS * 10) for seq in range(5_000)]
    assert len(encode(window(rows, groups=[A]))) < 40_000


def archive(plain: Any = None, **arrays: Any) -> bytes:
    """What :func:`encode` makes, with parts replaced."""
    with np.load(io.BytesIO(encode(full()))) as parts:
        found = {name: parts[name] for name in parts.files}
    if plain is not None:
        found["header"] = np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)
    made = io.BytesIO()
    np.savez(made, **{name: value for name, value in {**found, **arrays}.items() if value is not None})
    return made.getvalue()


def told(**changed: Any) -> dict[str, Any]:
    with np.load(io.BytesIO(encode(full()))) as parts:
        return {**json.loads(bytes(parts["header"]).decode()), **changed}


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_decoding_runs_no_code(tmp_path: Any) -> None:
    made = tmp_path / "made"
    bomb = np.array([Bomb(str(made))], dtype=object)
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, bomb, allow_pickle=True)
    zipped = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(encode(full()))) as good, zipfile.ZipFile(zipped, "w") as bad:
        for name in good.namelist():
            bad.writestr(name, buffer.getvalue() if name == "calls.npy" else good.read(name))
    for data in (zipped.getvalue(), buffer.getvalue(), pickle.dumps(Bomb(str(made)))):
        with pytest.raises(WindowError):
            decode(data)
    assert not made.exists()


HOSTILE = {
    "nothing": b"",
    "text": b"hello",
    "an archive of nothing": archive(calls=None, spans=None),
    "calls of another type": archive(calls=np.zeros(3, SPAN)),
    "spans of another type": archive(spans=np.zeros(3)),
    "own work of another type": archive(own=np.zeros(3)),
    "own work in two dimensions": archive(own=np.zeros((2, 2), OWN)),
    "calls that are one number": archive(calls=np.zeros((), CALL)),
    "calls in two dimensions": archive(calls=np.zeros((2, 2), CALL)),
    "spans in two dimensions": archive(spans=np.zeros((2, 2), SPAN)),
    "an unknown group": archive(calls=np.array([call(0, 1, 1, group=2)], CALL)),
    "an unknown operation": archive(calls=np.array([call(0, 1, 1, op=2)], CALL)),
    "text that is none": archive(header=np.array([255, 254], dtype=np.uint8)),
    "a list": archive([]),
    "groups missing": archive({}),
    "groups that are numbers": archive(told(groups=[1])),
    "ranks that are words": archive(told(groups=[["0", "", ["a"], ""], ["1", "", [], ""]])),
    "clocks with a part missing": archive(told(clocks=[[0, 1]])),
    "totals with a part missing": archive(told(totals=[[0, "0"]])),
    "a lost number that is none": archive(told(lost=[[0, None]])),
    "no ranks for the last": archive(told(last=5)),
    "deeply nested": archive(header=np.frombuffer(b"[" * 100_000, dtype=np.uint8)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_invalid_data_is_refused(data: bytes) -> None:
    with pytest.raises(WindowError, match="cannot be read"):
        decode(data)


def test_a_truncated_window_is_refused() -> None:
    data = encode(full())
    for length in range(0, len(data), 7):
        with pytest.raises(WindowError):
            decode(data[:length])


def test_random_bytes_raise_no_other_error() -> None:
    random, data = np.random.default_rng(0), encode(full())
    for _ in range(300):
        with pytest.raises(WindowError):
            decode(random.bytes(int(random.integers(0, 500))))
    for _ in range(300):
        broken = bytearray(data)
        for place in random.integers(0, len(data), 3):
            broken[place] ^= int(random.integers(1, 256))
        try:
            decode(bytes(broken))
        except WindowError:
            continue


def test_joining_windows_renumbers_their_groups_and_operations() -> None:
    first = window([call(0, 1, 10), call(0, 2, 20, group=1, op=1)], groups=[A, B], ops=["all_reduce", "broadcast"])
    second = window([call(1, 1, 30, group=1), call(1, 2, 40, op=1)], groups=[B, A], ops=["broadcast", "reduce"])
    found = joined([first, second])
    named = [
        (row["rank"], found.groups[row["group"]].name, found.ops[row["op"]], row["seq"], row["created_ns"])
        for row in found.calls
    ]
    assert named == [
        (0, "0", "all_reduce", 1, 10),
        (0, "mine", "broadcast", 2, 20),
        (1, "0", "broadcast", 1, 30),
        (1, "mine", "reduce", 2, 40),
    ]
    assert len(found.groups) == 2 and len(found.ops) == 3


def test_joining_does_not_change_its_windows() -> None:
    first, second = window([call(0, 1, 1)], groups=[A]), window([call(1, 1, 1)], groups=[B, A])
    joined([first, second])
    assert (first.calls["group"][0], second.calls["group"][0]) == (0, 0)


@pytest.mark.parametrize("turned", [False, True])
def test_members_known_to_one_rank_are_known(turned: bool) -> None:
    unknown, is_known = GroupMembers(name="x"), GroupMembers(name="x", ranks=(0, 1))
    windows = [window(groups=[unknown]), window(groups=[is_known])]
    assert joined(windows[::-1] if turned else windows).groups == (is_known,)


def test_joined_windows_add_up_their_numbers() -> None:
    total = OpTotal(group="0", op="all_reduce", count=1, size_bytes=2, duration_ns=3, timed=1)
    other = OpTotal(group="0", op="reduce", count=5)
    first = window(totals={0: (total,)}, lost={0: 1}, left_out={0: 2}, missing=("a",), clocks=known([0]))
    second = window(
        totals={0: (total, other), 1: (total,)},
        lost={0: 3, 1: 4},
        left_out={1: 5},
        last=frozenset([1]),
        missing=("b", "a"),
        clocks={0: Clock(offset_ns=7, uncertainty_ns=1)},
    )
    found = joined([first, second])
    twice = OpTotal(group="0", op="all_reduce", count=2, size_bytes=4, duration_ns=6, timed=2)
    assert found.totals == {0: (twice, other), 1: (total,)}
    assert (found.lost, found.left_out, found.last) == ({0: 4, 1: 4}, {0: 2, 1: 5}, frozenset([1]))
    assert found.missing == ("a", "b")
    assert found.clocks == {0: Clock(offset_ns=7, uncertainty_ns=1)}, "the later clock counts"


def test_nothing_joined_is_an_empty_window() -> None:
    assert_same(joined([]), empty_window())
    assert_same(joined([empty_window(), full()]), full())
