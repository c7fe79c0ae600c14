"""The files that a path means, and their content in bounded amounts, compressed with gzip or not."""

import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import IO

from lightning_ncclsafe.reading.values import ReadingError

MOST_FILES = 200_000
MOST_UNPACKED = 4 * 1024**3
"""Bytes read from a compressed log; other logs are read to their end."""
_HEAD = 4096
_LOGS = (".log", ".txt", ".out", ".err", ".stderr", ".stdout", ".o", ".e", "")
_OURS = re.compile(rb'\s*\{\s*"schema"\s*:')
_GZIP = b"\x1f\x8b"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


class FileKind(str, Enum):
    """What a file looks like from its first bytes."""

    PICKLE = "pickle"
    JSON = "json"
    REPORT = "report"
    """JSON that begins as our reports do, which may be large."""
    TEXT = "text"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file to be read.

    Attributes:
        path: Its path.
        kind: What it looks like.
        packed: Whether it is compressed with gzip.
        named: Whether the user named the file itself, and not only its folder.
    """

    path: str
    kind: FileKind
    packed: bool = False
    named: bool = False


def found(path: str) -> Iterator[Source]:
    """The files that a path means: itself, or all useful ones below it, in the order of their names.

    Raises:
        ReadingError: If there is no such path, it is neither a file nor a folder, or holds too many files.
        OSError: If it cannot be read.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        yield from _below(path)
    elif stat.S_ISREG(mode):
        yield _looked_at(path, named=True)
    else:
        raise ReadingError("it is neither a file nor a folder")


def _below(folder: str) -> Iterator[Source]:
    seen = 0
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            seen += 1
            if seen > MOST_FILES:
                raise ReadingError(f"it holds more than {MOST_FILES:,} files: name the folder of the dumps alone")
            source = _of_use(os.path.join(directory, name))
            if source is not None:
                yield source


def _of_use(path: str) -> Source | None:
    """A file of a folder that cannot be read, or is something else, is no error."""
    try:
        if os.path.basename(path).startswith(".") or not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        source = _looked_at(path, named=False)
    except OSError:
        return None
    if source.kind is FileKind.TEXT and _suffix(path) not in _LOGS:
        return None
    return None if source.kind is FileKind.OTHER else source


def _suffix(path: str) -> str:
    """``".log"`` of ``"a.log.gz"`` and of ``"a.log.3"``; empty of ``"prefix3"`` and of ``"rank.3"``."""
    stem = path.removesuffix(".gz")
    suffix = os.path.splitext(stem)[1].lower()
    return os.path.splitext(os.path.splitext(stem)[0])[1].lower() if suffix.strip(".").isdigit() else suffix


def _looked_at(path: str, *, named: bool) -> Source:
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    packed = head.startswith(_GZIP)
    if packed:
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD)
        except zlib.error:
            head = b"\0"
    return Source(path=path, kind=_kind(head), packed=packed, named=named)


def _kind(head: bytes) -> FileKind:
    if head[:1] == b"\x80" and head[1:2] <= b"\x08":
        return FileKind.PICKLE
    if head.startswith(_UTF_16) and not head[2:].count(b"\0\0"):
        return FileKind.TEXT
    if b"\0" in head:
        return FileKind.OTHER
    if not head.lstrip().startswith(b"{"):
        return FileKind.TEXT
    return FileKind.REPORT if _OURS.match(head) else FileKind.JSON


def opened(source: Source) -> IO[bytes]:
    """The content of a file as a stream, unpacked."""
    return gzip.open(source.path, "rb") if source.packed else open(source.path, "rb")  # type: ignore[return-value]


def content(source: Source, most: int) -> bytes:
    """All of a file, unpacked.

    Raises:
        ReadingError: If it has more, or is damaged.
        OSError: If it cannot be read.
    """
    try:
        with opened(source) as file:
            data = file.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReadingError(f"it is a damaged gzip file ({error})") from error
    if len(data) > most:
        raise ReadingError(f"it is larger than {most / 1024**2:,.0f} MiB, the limit")
    return data
