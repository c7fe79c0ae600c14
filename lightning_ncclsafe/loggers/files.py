"""Delivers staged frames to the files of a directory, each exactly once, whatever is interrupted when.

The directory is on a mounted file system or below an fsspec URL.
"""

import csv
import errno
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from lightning_ncclsafe.loggers.segments import StagedFrame

Anchors = dict[str, dict[str, Any]]
# A file that is refused this often in a row, for a reason that does not pass, is given up.
_MOST_REFUSALS = 3
_LASTING = (errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR, errno.ELOOP)
# Errors of the data itself. Anything else, raised by the client of an object store for instance, may be an outage.
_OF_DATA = (csv.Error, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# The largest field that the csv module reads is a setting of the whole process.
_field_size = threading.Lock()


class Destination(Protocol):
    """A directory of files. Names are relative, with ``/``. Every call may block for as long as the storage does.

    Attributes:
        path: The directory, as the user knows it.
        pace_s: Least pause between two writes, seconds.
        appends: Whether what is appended to a file can be read from that file.
        folders: Its absolute paths on this host.
    """

    path: str
    pace_s: float
    appends: bool
    folders: tuple[str, ...]

    def size(self, file: str) -> int | None:
        """Bytes of a file; None if there is none."""

    def append(self, file: str, data: bytes) -> None:
        """Appends; creates the file and its directory if needed.

        Raises:
            OSError: If the storage refuses. A part may have been written.
        """

    def read(self, file: str, start: int = 0) -> bytes:
        """The bytes of a file from ``start`` on; empty if there is no file."""

    def replace(self, file: str, data: bytes) -> None:
        """Writes a whole file; readers see the old or the new one."""


class LocalDestination:
    """A directory of a mounted file system.

    Args:
        path: The directory.
        device: Number of its device when the run began. A directory that is removed is created again, but not on the
            disk below a mount that is gone.
    """

    pace_s = 1.0
    appends = True

    def __init__(self, path: str, device: int | None = None) -> None:
        self.path = path
        # A program may change its working directory.
        self._folder = Path(path).absolute()
        self.folders = tuple({os.path.abspath(path), os.path.realpath(path)})
        self._device = device if device is not None else _device_of(self._folder)

    @property
    def device(self) -> int:
        """Device number of the directory, or of what exists above it."""
        return self._device

    def size(self, file: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return (self._folder / file).stat().st_size
        except FileNotFoundError:
            return None

    def append(self, file: str, data: bytes) -> None:
        """Appends in one system call, so that readers see whole records."""
        handle = self._open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
        finally:
            os.close(handle)

    def read(self, file: str, start: int = 0) -> bytes:
        """The bytes of a file from ``start`` on; empty if there is no file."""
        try:
            with open(self._folder / file, "rb") as opened:
                opened.seek(start)
                return opened.read()
        except FileNotFoundError:
            return b""

    def replace(self, file: str, data: bytes) -> None:
        """Writes a temporary file, then renames it."""
        path = self._folder / file
        temporary = path.with_name(f".{path.name}.ncclsafe")
        handle = self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with open(handle, "wb") as opened:
                opened.write(data)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _open(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            if _device_of(path.parent) != self._device:
                raise OSError(f"the file system that {self.path} was on is no longer mounted") from None
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o666)


class RemoteDestination:
    """A directory of an fsspec file system. If it cannot append, each append becomes a numbered file of its own.

    Args:
        path: The directory's URL.
    """

    # An append may create a new object or send the whole object again.
    pace_s = 10.0
    folders: tuple[str, ...] = ()
    # Some file systems can, but which ones is known only after an append.
    appends = False

    def __init__(self, path: str) -> None:
        from fsspec.core import url_to_fs

        self.path = path
        self._fs: Any
        self._fs, self._root = url_to_fs(path)
        self._tries_append = True
        # The last number of each file.
        self._numbers: dict[str, int] = {}

    def size(self, file: str) -> int | None:
        """Bytes of a file and of its numbered ones; None if there is none."""
        sizes = []
        name, number = file, 0
        while (size := self._size_of(name)) is not None or not number:
            sizes += [] if size is None else [size]
            number += 1
            name = f"{file}.{number}"
        return sum(sizes) if sizes else None

    def append(self, file: str, data: bytes) -> None:
        """Appends, or writes the next numbered file."""
        if self._tries_append:
            try:
                self._fs.makedirs(self._name(file).rpartition("/")[0], exist_ok=True)
                with self._open(file) as opened:
                    opened.write(data)
                return
            except (NotImplementedError, ValueError):
                self._tries_append = False
        # Checked even after a failure, as it may have been written anyway.
        number = self._numbers.get(file, 1)
        while self._fs.exists(self._name(f"{file}.{number}")):
            number += 1
        self._numbers[file] = number
        self._fs.pipe_file(self._name(f"{file}.{number}"), data)

    def _open(self, file: str) -> Any:
        try:
            return self._fs.open(self._name(file), "ab")
        except FileNotFoundError:  # some append only to existing files, as fsspec's memory did until 2025
            return self._fs.open(self._name(file), "wb")

    def read(self, file: str, start: int = 0) -> bytes:
        """The bytes of a file from ``start`` on; empty if there is no file."""
        try:
            return bytes(self._fs.cat_file(self._name(file), start=start or None))
        except FileNotFoundError:
            return b""

    def replace(self, file: str, data: bytes) -> None:
        """Writes a whole file: object stores show the old one until the new one is complete."""
        self._fs.makedirs(self._name(file).rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(self._name(file), data)

    def _size_of(self, name: str) -> int | None:
        try:
            return int(self._fs.size(self._name(name)))
        except FileNotFoundError:
            return None

    def _name(self, file: str) -> str:
        return f"{self._root.rstrip('/')}/{file}"


def open_destination(path: str, device: int | None = None) -> Destination:
    """The destination at a path or a URL (``"s3://…"``)."""
    return RemoteDestination(path) if "://" in path else LocalDestination(path, device)


def _device_of(path: Path) -> int:
    """The device that a path is on, or would be on if created."""
    for there in (path.absolute(), *path.absolute().parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            return there.stat().st_dev
    return -1


class FilesSink:
    """Writes frames to files.

    The state of a file after its last complete delivery is its *anchor*: its size in bytes, or for CSV its number of
    rows. After a fault or a crash, what the file has beyond its anchor is not sent again.

    Args:
        destination: The directory.
        anchors: State after earlier deliveries, by file; changed as files grow.
        note: Saves the anchors.
        reject: Called with the frames of a file that can never be written, and why; they are left out. None: they are
            retried forever, and hold up what is behind them.
    """

    def __init__(
        self,
        destination: Destination,
        anchors: Anchors,
        note: Callable[[], None] = lambda: None,
        reject: Callable[[Sequence[StagedFrame], Exception], None] | None = None,
    ) -> None:
        self.destination = destination
        self.pace_s = destination.pace_s
        self._anchors = anchors
        self._note = note
        self._reject = reject
        # How often in a row each kind of write to each file was refused for a reason that does not pass.
        self._refusals: dict[tuple[str, str], int] = {}
        # Files that are known to match their anchor.
        self._sure: set[str] = set()

    def deliver(self, frames: Sequence[StagedFrame]) -> None:
        """Delivers frames in order, coalesced into one write per file. A file that refuses does not hold up others.

        Raises:
            Exception: If the storage refuses. The same frames, and more behind them, may come again.
        """
        sure, self._sure = self._sure, set()
        after: Anchors = {}
        failed: list[_Refused] = []
        ordered = sorted(frames, key=lambda frame: (frame.kind, frame.file))
        for key, group in groupby(ordered, key=lambda frame: (frame.kind, frame.file)):
            same = list(group)
            try:
                after.update(self._write(same, same[0].file in sure))
                self._refusals.pop(key, None)
            except Exception as error:
                failed.append(_Refused(key, same, error))
        if failed:
            self._give_up(failed)
        # Only now: a delivery that fails half-way is repeated from its beginning.
        self._anchors.update(after)
        self._sure = (sure | set(after)) - {refused.key[1] for refused in failed}

    def _write(self, frames: Sequence[StagedFrame], sure: bool) -> Anchors:
        """Writes the frames of one kind and one file; returns the new anchors."""
        kind, file = frames[0].kind, frames[0].file
        if kind == "append":
            return {file: self._append(file, b"".join(frame.body for frame in frames), sure)}
        if kind == "rows":
            rows = [json.loads(line) for frame in frames for line in frame.body.splitlines()]
            return dict([self._add_rows(file, rows, sure)]) if rows else {}
        if kind == "whole":
            self._replace(file, frames)
        return {}

    def _give_up(self, failed: "Sequence[_Refused]") -> None:
        """Leaves out what can never be written if nothing else has failed; otherwise raises."""
        for refused in failed:
            before = self._refusals.get(refused.key, 0)
            self._refusals[refused.key] = before + 1 if _lasts(refused.error) else 0
        if self._reject is None or any(self._refusals[refused.key] < _MOST_REFUSALS for refused in failed):
            raise failed[0].error
        for refused in failed:
            del self._refusals[refused.key]
            kind, file = refused.key
            if kind == "append":
                # A part may have been written, which must not be taken for the beginning of what comes next.
                with suppress(Exception):
                    self._set_anchor(file, {"size": self.destination.size(file) or 0})
            self._reject(refused.frames, refused.error)

    def _append(self, file: str, data: bytes, sure: bool) -> dict[str, Any]:
        size = self._anchors.get(file, {}).get("size", 0)
        if not sure:
            there = self.destination.size(file) or 0
            if there < size:
                # It was removed. Nothing of this delivery is in it yet, but would be after a fault.
                size = there
                self._set_anchor(file, {"size": size})
            data = data[there - size :]
            size = there
        if data:
            self.destination.append(file, data)
        return {"size": size + len(data)}

    def _add_rows(self, file: str, rows: list[dict[str, Any]], sure: bool) -> tuple[str, dict[str, Any]]:
        anchor = self._anchors.get(file)
        if sure and anchor is not None and self.destination.appends:
            header = _header(anchor["header"], rows)
            # It may have been removed since, or somebody else has written to it.
            if header == anchor["header"] and "size" in anchor and self.destination.size(file) == anchor["size"]:
                data = _csv(header, rows, with_header=False)
                self.destination.append(file, data)
                return file, {**anchor, "rows": anchor["rows"] + len(rows), "size": anchor["size"] + len(data)}
        table = _read_table(self.destination.read(file))
        first = _values(table.rows[0]) if table.rows else None
        if anchor is not None and first is not None and first != (anchor["first"] or _values(rows[0])):
            # Another run writes to this file by now.
            return self._add_rows(f"recovered-{file}", rows, False)
        there = len(table.rows)
        if anchor is None or there < anchor["rows"] or (sure and there > anchor["rows"]):
            # Rows of an earlier stage, the rest after a removal, or rows of somebody else: none of this delivery.
            anchor = {"rows": there, "first": first, "header": table.header}
            self._set_anchor(file, anchor)
        rows = rows[_same(rows, table.rows[anchor["rows"] :]) :]
        every = [*table.rows, *rows]
        header = _header(table.header, rows)
        size = table.bytes + self._add_to_table(file, table, header, rows)
        return file, {
            "rows": len(every),
            "first": _values(every[0]) if every else None,
            "header": header,
            "size": size,
        }

    def _add_to_table(self, file: str, table: "_CsvTable", header: list[str], rows: list[dict[str, Any]]) -> int:
        """Adds rows to a file; returns by how much it has grown."""
        fits = table.is_whole and header == table.header
        if fits and not rows:
            return 0
        if fits and table.rows and self.destination.appends:
            data = _csv(header, rows, with_header=False)
            self.destination.append(file, data)
            return len(data)
        data = _csv(header, [*table.rows, *rows], with_header=True)
        self.destination.replace(file, data)
        return len(data) - table.bytes

    def _replace(self, file: str, frames: Sequence[StagedFrame]) -> None:
        certain = [frame for frame in frames if not frame.details.get("if_absent")]
        if certain or self.destination.size(file) is None:
            self.destination.replace(file, (certain[-1:] or frames)[0].body)

    def _set_anchor(self, file: str, anchor: dict[str, Any]) -> None:
        """Saves what a delivery finds before it changes it."""
        self._anchors[file] = anchor
        self._note()


@dataclass(frozen=True, slots=True)
class _Refused:
    """Frames of one kind and file that could not be written, and why."""

    key: tuple[str, str]
    frames: Sequence[StagedFrame]
    error: Exception


@dataclass(frozen=True, slots=True)
class _CsvTable:
    """A CSV file.

    Attributes:
        header: Its columns.
        rows: Its complete rows.
        is_whole: Whether its last row is complete.
        bytes: Length of the file.
    """

    header: list[str]
    rows: list[dict[str, Any]]
    is_whole: bool
    bytes: int


def _read_table(data: bytes) -> _CsvTable:
    whole, newline, rest = data.rpartition(b"\n")
    # A row does not end within quotes.
    while whole.count(b'"') % 2:
        whole, newline, rest = whole.rpartition(b"\n")
    reader = csv.DictReader(io.StringIO((whole + newline).decode(errors="replace"), newline=""))
    with _fields_of_any_size():
        rows: list[dict[str, Any]] = list(reader)
        return _CsvTable(list(reader.fieldnames or ()), rows, not rest, len(data))


@contextmanager
def _fields_of_any_size() -> Iterator[None]:
    with _field_size:
        limit = csv.field_size_limit(sys.maxsize)
        try:
            yield
        finally:
            csv.field_size_limit(limit)


def _header(header: Sequence[str], rows: Iterable[dict[str, Any]]) -> list[str]:
    """The columns, sorted, as Lightning's CSVLogger has them."""
    return sorted(set(header).union(*rows))


def _csv(header: list[str], rows: Iterable[dict[str, Any]], *, with_header: bool) -> bytes:
    made = io.StringIO(newline="")
    writer = csv.DictWriter(made, fieldnames=header, extrasaction="ignore")
    if with_header:
        writer.writeheader()
    writer.writerows(rows)
    return _bytes(made.getvalue())


def _bytes(text: str) -> bytes:
    """The text in UTF-8; half a surrogate pair, which UTF-8 cannot encode, as ``\\udXXX``."""
    return text.encode(errors="backslashreplace")


def _same(rows: Sequence[dict[str, Any]], there: Sequence[dict[str, Any]]) -> int:
    """How many of the first rows the file already has: somebody else may have written between ours."""
    pairs = enumerate(zip(rows, there, strict=False))
    return next((place for place, (row, found) in pairs if _values(row) != _values(found)), min(len(rows), len(there)))


def _values(row: dict[str, Any]) -> dict[str, str]:
    """The values of a row, whatever other columns there are."""
    return {key: _bytes(str(value)).decode() for key, value in row.items() if value is not None and value != ""}


def _lasts(error: Exception) -> bool:
    """Whether an error is the same however often the write is retried."""
    return error.errno in _LASTING if isinstance(error, OSError) else isinstance(error, _OF_DATA)
