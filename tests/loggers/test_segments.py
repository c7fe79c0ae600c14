"""Frames are read back as they were written, up to the first that is not whole."""

import json
import random
import struct
import zlib
from typing import Any, get_args

import pytest

from lightning_ncclsafe.loggers.segments import FrameKind, StagedFrame, decode, encode

FRAMES = [
    StagedFrame(kind="append", file="events.out.1", body=b"\x00\xffrecord", points=3),
    StagedFrame(kind="rows", file="metrics.csv", body=b'{"loss": NaN}\n{"loss": 1}', points=2),
    StagedFrame(kind="whole", file="sub/hparams.yaml", body=b"", records=1, keep=True, details={"if_absent": True}),
    StagedFrame(kind="call", file="log_metrics", body="größer".encode(), points=1, details={"number": 7}),
]
HEAD = {"kind": "append", "file": "f", "points": 1, "records": 0, "keep": False, "details": {}}


def read(data: bytes) -> list[StagedFrame]:
    return [frame for frame, _ in decode(data)]


def written(header: bytes, body: bytes = b"body") -> bytes:
    """A frame whose checksum is right, whatever its header says."""
    return struct.pack("<III", len(header), len(body), zlib.crc32(body, zlib.crc32(header))) + header + body


def test_frames_of_all_kinds_round_trip() -> None:
    assert {frame.kind for frame in FRAMES} == set(get_args(FrameKind))
    assert read(b"".join(map(encode, FRAMES))) == FRAMES


def test_each_frame_has_the_offset_of_its_end() -> None:
    data = b"".join(map(encode, FRAMES))
    ends = [end for _, end in decode(data)]
    assert ends == [sum(len(encode(frame)) for frame in FRAMES[: number + 1]) for number in range(len(FRAMES))]
    assert read(data[ends[1] :]) == FRAMES[2:]


def test_a_truncated_frame_ends_the_reading() -> None:
    data = b"".join(map(encode, FRAMES))
    ends = [end for _, end in decode(data)]
    for cut in range(len(data) + 1):
        assert read(data[:cut]) == FRAMES[: sum(end <= cut for end in ends)], cut


def test_a_flipped_byte_ends_the_reading_before_its_frame() -> None:
    data = b"".join(map(encode, FRAMES))
    ends = [end for _, end in decode(data)]
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            flipped = data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
            assert read(flipped) == FRAMES[: sum(end <= place for end in ends)], place


@pytest.mark.parametrize("lengths", [(2**32 - 1, 2**32 - 1), (2**31, 0), (0, 2**32 - 1), (1, 0), (0, 0)])
def test_invalid_lengths_end_the_reading(lengths: tuple[int, int]) -> None:
    before = encode(FRAMES[0])
    for checksum in (0, 1):
        assert read(before + struct.pack("<III", *lengths, checksum) + b"rest") == FRAMES[:1]


def test_any_bytes_are_read_without_an_error() -> None:
    chance = random.Random(0)
    for size in range(200):
        assert read(chance.randbytes(size)) == []
    assert read(bytes(10_000)) == []


@pytest.mark.parametrize(
    "file", ["../x", "/etc/x", "a/../../x", "..", "", ".", "/", "a\0b", 5, None, ["a"], {"a": 1}], ids=repr
)
def test_a_name_outside_the_directory_is_not_a_frame(file: Any) -> None:
    assert read(written(json.dumps({**HEAD, "file": file}).encode())) == []


@pytest.mark.parametrize("file", ["..x", "a..b/c", "sub/.hidden", "a\\..\\b", "ä b"])
def test_a_name_below_the_directory_is_a_frame(file: str) -> None:
    assert [frame.file for frame in read(written(json.dumps({**HEAD, "file": file}).encode()))] == [file]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "evil"),
        ("kind", ["append"]),
        ("kind", None),
        ("points", "many"),
        ("points", None),
        ("points", float("inf")),
        ("records", float("nan")),
        ("records", [1]),
        ("details", 5),
        ("details", ["ab", "c"]),
    ],
)
def test_a_header_of_wrong_types_is_not_a_frame(name: str, value: Any) -> None:
    assert len(read(written(json.dumps(HEAD).encode()))) == 1
    assert read(written(json.dumps({**HEAD, name: value}).encode())) == []


@pytest.mark.parametrize("missing", HEAD)
def test_an_incomplete_header_is_not_a_frame(missing: str) -> None:
    assert read(written(json.dumps({name: value for name, value in HEAD.items() if name != missing}).encode())) == []


@pytest.mark.parametrize(
    "header", [b"", b"null", b"[]", b'"kind"', b"5", b"\xff\xfe", b"{", b"[" * 100_000, b'{"kind":' * 50_000]
)
def test_a_header_that_is_not_an_object_is_not_a_frame(header: bytes) -> None:
    assert read(encode(FRAMES[0]) + written(header) + encode(FRAMES[1])) == FRAMES[:1]
