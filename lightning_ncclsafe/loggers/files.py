"""Delivers staged frames to the files of a directory, each exactly once, whatever is interrupted when."""

import csv
import errno
import io
import json
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

from lightning_ncclsafe.loggers.destinations import Destination
from lightning_ncclsafe.loggers.segments import StagedFrame

# The largest field that the csv module reads is a setting of the whole process.
_field_size = threading.Lock()


class CsvTable(NamedTuple):
    """A CSV file: its columns, its complete rows, whether its last row is one of these, and its length in bytes."""

    header: list[str]
    rows: list[dict[str, Any]]
    is_whole: bool
    bytes: int


def read_table(data: bytes) -> CsvTable:
    """The content of a file; a row that was not written to its end is left out."""
    whole, newline, rest = data.rpartition(b"\n")
    # A row does not end within quotes.
    while whole.count(b'"') % 2:
        whole, newline, rest = whole.rpartition(b"\n")
    reader = csv.DictReader(io.StringIO((whole + newline).decode(errors="replace"), newline=""))
    with _field_size:
        limit = csv.field_size_limit(sys.maxsize)
        try:
            rows: list[dict[str, Any]] = list(reader)
        finally:
            csv.field_size_limit(limit)
    return CsvTable(list(reader.fieldnames or ()), rows, not rest, len(data))


def columns_with(header: Sequence[str], rows: Iterable[dict[str, Any]]) -> list[str]:
    """The columns, sorted, as Lightning's CSVLogger has them."""
    return sorted(set(header).union(*rows))


def csv_bytes(header: list[str], rows: Iterable[dict[str, Any]], *, with_header: bool) -> bytes:
    """Rows as they are written to a file, below the columns if these are to be written, too."""
    made = io.StringIO(newline="")
    writer = csv.DictWriter(made, fieldnames=header, extrasaction="ignore")
    if with_header:
        writer.writeheader()
    writer.writerows(rows)
    return _bytes(made.getvalue())


def _bytes(text: str) -> bytes:
    """The text in UTF-8; half a surrogate pair, which UTF-8 cannot encode, as ``\\udXXX``."""
    return text.encode(errors="backslashreplace")


def rows_in_common(rows: Sequence[dict[str, Any]], there: Sequence[dict[str, Any]]) -> int:
    """How many of the first rows the file already has: another program may have written in between."""
    pairs = enumerate(zip(rows, there, strict=False))
    return next((place for place, (row, found) in pairs if cells(row) != cells(found)), min(len(rows), len(there)))


def cells(row: dict[str, Any]) -> dict[str, str]:
    """The values of a row, whatever other columns there are."""
    return {key: _bytes(str(value)).decode() for key, value in row.items() if value is not None and value != ""}


Anchors = dict[str, dict[str, Any]]
# What could not be written, and why, by kind and file.
_Failed = dict[tuple[str, str], tuple[Sequence[StagedFrame], Exception]]
# A file that is refused this often in a row, for a reason that does not pass, is given up.
_MOST_REFUSALS = 3
_LASTING = (errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR, errno.ELOOP)
# Errors of the data itself. Anything else, raised by the client of an object store for instance, may be an outage.
_OF_DATA = (csv.Error, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class FilesSink:
    """Writes frames to files.

    The state of a file after its last complete delivery is its *anchor*: its size in bytes, or for CSV its number of
    rows. After a fault or a crash, what the file has beyond its anchor is not sent again.

    Args:
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
        failed: _Failed = {}
        ordered = sorted(frames, key=lambda frame: (frame.kind, frame.file))
        for key, group in groupby(ordered, key=lambda frame: (frame.kind, frame.file)):
            same = list(group)
            try:
                after.update(self._write(*key, same, key[1] in sure))
                self._refusals.pop(key, None)
            except Exception as error:
                failed[key] = same, error
        if failed:
            self._give_up(failed)
        # Only now: a delivery that fails half-way is repeated from its beginning.
        self._anchors.update(after)
        self._sure = (sure | set(after)) - {file for _, file in failed}

    def _write(self, kind: str, file: str, frames: Sequence[StagedFrame], sure: bool) -> Anchors:
        """Writes the frames of one kind and one file; returns the new anchors."""
        if kind == "append":
            return {file: self._append(file, b"".join(frame.body for frame in frames), sure)}
        if kind == "rows":
            rows = [json.loads(line) for frame in frames for line in frame.body.splitlines()]
            return self._add_rows(file, rows, sure) if rows else {}
        certain = [frame for frame in frames if not frame.details.get("if_absent")]
        if kind == "whole" and (certain or self.destination.size(file) is None):
            self.destination.replace(file, (certain[-1:] or frames)[0].body)
        return {}

    def _give_up(self, failed: _Failed) -> None:
        """Leaves out what can never be written if nothing else has failed; otherwise raises."""
        for key, (_, error) in failed.items():
            # Whether it is the same however often the write is retried.
            lasts = error.errno in _LASTING if isinstance(error, OSError) else isinstance(error, _OF_DATA)
            self._refusals[key] = self._refusals.get(key, 0) + 1 if lasts else 0
        if self._reject is None or any(self._refusals[key] < _MOST_REFUSALS for key in failed):
            raise next(error for _, error in failed.values())
        for (kind, file), (frames, error) in failed.items():
            del self._refusals[kind, file]
            if kind == "append":
                # A part may have been written, which must not be taken for the beginning of what comes next.
                with suppress(Exception):
                    self._set_anchor(file, {"size": self.destination.size(file) or 0})
            self._reject(frames, error)

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

    def _add_rows(self, file: str, rows: list[dict[str, Any]], sure: bool) -> Anchors:
        anchor = self._anchors.get(file)
        if sure and anchor is not None and self.destination.appends:
            header = columns_with(anchor["header"], rows)
            # It may have been removed since, or another program has written to it.
            if header == anchor["header"] and "size" in anchor and self.destination.size(file) == anchor["size"]:
                data = csv_bytes(header, rows, with_header=False)
                self.destination.append(file, data)
                return {file: {**anchor, "rows": anchor["rows"] + len(rows), "size": anchor["size"] + len(data)}}
        table = read_table(self.destination.read(file))
        first = cells(table.rows[0]) if table.rows else None
        if anchor is not None and first is not None and first != (anchor["first"] or cells(rows[0])):
            # Another run writes to this file by now.
            return self._add_rows(f"recovered-{file}", rows, False)
        there = len(table.rows)
        if anchor is None or there < anchor["rows"] or (sure and there > anchor["rows"]):
            # Rows of an earlier stage, the rest after a removal, or another program's rows: none of this delivery.
            anchor = {"rows": there, "first": first, "header": table.header}
            self._set_anchor(file, anchor)
        rows = rows[rows_in_common(rows, table.rows[anchor["rows"] :]) :]
        every = [*table.rows, *rows]
        header = columns_with(table.header, rows)
        size = self._add_to_table(file, table, header, rows)
        return {file: {"rows": len(every), "first": cells(every[0]) if every else None, "header": header, "size": size}}

    def _add_to_table(self, file: str, table: CsvTable, header: list[str], rows: list[dict[str, Any]]) -> int:
        """Adds rows to a file; returns its new length."""
        fits = table.is_whole and header == table.header
        if fits and not rows:
            return table.bytes
        if fits and table.rows and self.destination.appends:
            data = csv_bytes(header, rows, with_header=False)
            self.destination.append(file, data)
            return table.bytes + len(data)
        data = csv_bytes(header, [*table.rows, *rows], with_header=True)
        self.destination.replace(file, data)
        return len(data)

    def _set_anchor(self, file: str, anchor: dict[str, Any]) -> None:
        """Saves what a delivery finds before it changes it."""
        self._anchors[file] = anchor
        self._note()
