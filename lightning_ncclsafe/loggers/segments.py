"""The files of a folder of local staging: segments of frames, and a note of how far they are delivered.

A frame has a header that names where its bytes belong, and a checksum, so that what a killed process leaves can be read
up to the frame it died in. Headers are JSON; nothing in a frame is ever executed.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from lightning_ncclsafe.loggers.staging import open_regular, read_small, write_small

FrameKind = Literal["append", "rows", "whole", "call"]
"""How a frame's bytes are delivered: appended to a file, added to a CSV file as rows (one JSON object per line),
written as a whole file, or passed to the logger as a call."""
# Length of header, length of body, checksum of both.
_PREFIX = struct.Struct("<III")
# No frame comes near this size; a larger length is damage.
_LARGEST_BYTES = 1 << 31
_DELIVERED = "delivered.json"
_SUFFIX = ".frames"
# More than most frames have.
_CHUNK_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFrame:
    """A piece of what a logger has to write.

    Attributes:
        kind: How it is delivered.
        file: Name of the file below the logger's directory, with ``/``; of a call, its name.
        body: The bytes.
        points: Scalar points in it.
        records: Everything else in it: media, text, hyperparameters.
        keep: Whether it must never be dropped.
        details: What else this kind needs, in JSON's types.
    """

    kind: FrameKind
    file: str
    body: bytes
    points: int = 0
    records: int = 0
    keep: bool = False
    details: dict[str, Any] = field(default_factory=dict)


def encode(frame: StagedFrame) -> bytes:
    """A frame's bytes."""
    head = {name: getattr(frame, name) for name in ("kind", "file", "points", "records", "keep", "details")}
    header = json.dumps(head, separators=(",", ":")).encode()
    checksum = zlib.crc32(frame.body, zlib.crc32(header))
    return b"".join((_PREFIX.pack(len(header), len(frame.body), checksum), header, frame.body))


def decode(data: bytes) -> Iterator[tuple[StagedFrame, int]]:
    """The frames at the beginning of ``data``, each with the offset of its end.

    Stops at an incomplete frame, or at bytes that are not a frame.
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


def _frame(header: bytes, body: bytes) -> StagedFrame | None:
    try:
        head = json.loads(header)
        if head["kind"] not in get_args(FrameKind) or not _is_below(head["file"]):
            return None
        return StagedFrame(
            kind=head["kind"],
            file=head["file"],
            body=body,
            points=int(head["points"]),
            records=int(head["records"]),
            keep=bool(head["keep"]),
            details=dict(head["details"]),
        )
    # The last two are raised by an infinite count and by ten thousand brackets.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _is_below(file: str) -> bool:
    """Whether this names a file below the logger's directory: nothing outside of it may be written."""
    path = PurePosixPath(file)
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts and "\0" not in file


@dataclass(frozen=True, slots=True)
class Portion:
    """Frames that are read together and delivered together.

    Attributes:
        frames: The frames, in order.
        segment: Number of their segment; -1 for frames that could not be written.
        end: Offset of their end in the segment; for frames that could not be written, their number.
    """

    frames: tuple[StagedFrame, ...]
    segment: int
    end: int


@dataclass(slots=True)
class Segment:
    """A file of frames.

    Attributes:
        folder: The folder it is in.
        number: Its place in the order.
        size_bytes: Its length.
        released_bytes: How much of it, from its beginning, is delivered.
        points: Points in the rest, as far as this process wrote them.
        records: Everything else in the rest, as far as this process wrote it.
    """

    folder: Path
    number: int
    size_bytes: int = 0
    released_bytes: int = 0
    points: int = 0
    records: int = 0

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.number:08d}{_SUFFIX}"

    @property
    def rest_bytes(self) -> int:
        """How much of it is not delivered."""
        return self.size_bytes - self.released_bytes

    def count(self, frames: Sequence[StagedFrame], times: int = 1) -> None:
        """Counts frames that are added, or with ``times=-1`` removed."""
        # Never below zero, as what an earlier process left was not counted.
        self.points = max(self.points + times * sum(frame.points for frame in frames), 0)
        self.records = max(self.records + times * sum(frame.records for frame in frames), 0)

    def append(self, data: bytes) -> None:
        """Writes at the end, all or nothing.

        Raises:
            OSError: If that fails; ``FileNotFoundError`` if the file or the folder is removed.
        """
        # What was written before must still be there, or this would be looked for at the wrong offset.
        makes = 0 if self.size_bytes else os.O_CREAT
        # Unbuffered, so that it outlives the process from now on.
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | makes, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
        except OSError:
            # An incomplete frame would hide those after it.
            os.ftruncate(handle, self.size_bytes)
            raise
        finally:
            os.close(handle)
        self.size_bytes += len(data)

    def read(self, most_bytes: int) -> Portion | None:
        """The first frames of the rest, about ``most_bytes`` of them; None if there is no complete one."""
        frames: list[StagedFrame] = []
        end = 0
        # A recovery may ask for single calls, for each of which it must not read the whole file.
        chunk_bytes = max(2 * most_bytes, _CHUNK_BYTES)
        data = b""
        with open(self.path, "rb", opener=open_regular) as file:
            file.seek(self.released_bytes)
            while not frames and len(data) < self.rest_bytes:
                chunk = file.read(min(chunk_bytes, self.rest_bytes - len(data)))
                if not chunk:
                    break
                data += chunk
                chunk_bytes = len(data)
                for frame, end in decode(data):
                    frames.append(frame)
                    if end >= most_bytes:
                        break
        return Portion(tuple(frames), self.number, self.released_bytes + end) if frames else None

    def replace_rest(self, data: bytes) -> None:
        """Replaces what is not delivered; if that fails, the file is as it was."""
        temporary = self.path.with_suffix(".tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "wb") as file:
            # A hole takes the place of what is delivered, so that noted offsets stay true.
            file.truncate(self.released_bytes)
            file.seek(self.released_bytes)
            file.write(data)
        os.replace(temporary, self.path)
        self.size_bytes = self.released_bytes + len(data)

    def remove(self) -> None:
        """Removes the file."""
        with suppress(OSError):
            os.unlink(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """How far frames are delivered.

    Attributes:
        segment: Number of the first segment that is still needed; 0 for all that exist.
        released: How much of that one is delivered, bytes.
        anchors: State of each file of the destination after its last delivery.
    """

    segment: int = 0
    released: int = 0
    anchors: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_note(folder: Path, note: Note) -> bool:
    """Writes the note; returns whether it could."""
    # Without it, a recovery compares with what the storage has; the run itself does not need it.
    with suppress(OSError):
        write_small(folder / _DELIVERED, json.dumps(asdict(note)).encode())
        return True
    return False


def read_note(folder: Path) -> Note:
    """What an earlier process noted, as far as it is valid."""
    try:
        found = json.loads(read_small(folder / _DELIVERED))
    except (ValueError, RecursionError):
        found = {}
    noted = found if isinstance(found, dict) else {}
    anchors = noted.get("anchors")
    pairs = anchors.items() if isinstance(anchors, dict) else ()
    return Note(
        segment=_count(noted, "segment"),
        released=_count(noted, "released"),
        anchors={file: anchor for file, anchor in pairs if isinstance(anchor, dict)},
    )


def find_segments(folder: Path, note: Note) -> list[Segment]:
    """The segments that an earlier process left, in order."""
    numbers = sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit())
    segments = [Segment(folder, number) for number in numbers if number >= note.segment]
    for segment in segments:
        segment.size_bytes = segment.path.stat().st_size
        segment.released_bytes = min(note.released, segment.size_bytes) if segment.number == note.segment else 0
    return segments


def _count(noted: dict[str, Any], name: str) -> int:
    count = noted.get(name)
    return count if isinstance(count, int) and count >= 0 else 0
