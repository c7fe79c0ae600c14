"""What lies in local staging: frames, each with a header that says where its bytes belong.

A frame is written whole and carries a checksum, so that what a killed process left behind can be read up to the frame
it died in. Headers are JSON; nothing in a frame is ever executed.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

Kind = Literal["append", "rows", "whole", "call"]
"""How a frame's bytes are delivered: appended to a file, added to a CSV file as rows (one JSON object a line), written
as a whole file, or given to the logger as a call."""

# Length of header, length of body, checksum of both.
_PREFIX = struct.Struct("<III")
# No frame of ours comes near; a length beyond it is not one.
_LARGEST_BYTES = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFrame:
    """A piece of what a logger has to write.

    Attributes:
        kind: How it is delivered.
        file: Name of the file below the logger's directory, with ``/``; of a call, its name.
        body: The bytes.
        points: Scalar points in it.
        records: Everything else in it: media, text, hyperparameters.
        keep: Whether it must never be dropped.
        details: What this kind needs beside, in JSON's types.
    """

    kind: Kind
    file: str
    body: bytes
    points: int = 0
    records: int = 0
    keep: bool = False
    details: dict[str, Any] = field(default_factory=dict)


def encode(frame: LogFrame) -> bytes:
    """A frame's bytes."""
    head = {name: getattr(frame, name) for name in ("kind", "file", "points", "records", "keep", "details")}
    header = json.dumps(head, separators=(",", ":")).encode()
    checksum = zlib.crc32(frame.body, zlib.crc32(header))
    return b"".join((_PREFIX.pack(len(header), len(frame.body), checksum), header, frame.body))


def decode(data: bytes) -> Iterator[tuple[LogFrame, int]]:
    """The frames at the beginning of ``data``, each with the offset of its end.

    Stops where a frame is not whole, or where the bytes are no frame.
    """
    start = 0
    while len(data) - start >= _PREFIX.size:
        header_bytes, body_bytes, checksum = _PREFIX.unpack_from(data, start)
        body_at = start + _PREFIX.size + header_bytes
        end = body_at + body_bytes
        if header_bytes + body_bytes > _LARGEST_BYTES or end > len(data):
            return
        header, body = data[body_at - header_bytes : body_at], data[body_at:end]
        frame = _frame(header, body) if zlib.crc32(body, zlib.crc32(header)) == checksum else None
        if frame is None:
            return
        yield frame, end
        start = end


def _frame(header: bytes, body: bytes) -> LogFrame | None:
    try:
        head = json.loads(header)
        if head["kind"] not in get_args(Kind) or not _is_below(head["file"]):
            return None
        return LogFrame(
            kind=head["kind"],
            file=head["file"],
            body=body,
            points=int(head["points"]),
            records=int(head["records"]),
            keep=bool(head["keep"]),
            details=dict(head["details"]),
        )
    # The last two are what an infinite count and ten thousand brackets come to.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _is_below(file: str) -> bool:
    """Whether this is the name of a file below the logger's directory: nothing outside of it is ours to write."""
    path = PurePosixPath(file)
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts and "\0" not in file
