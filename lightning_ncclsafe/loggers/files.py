"""Delivers staged frames to the files of a directory, each exactly once, whatever was interrupted when."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lightning_ncclsafe.loggers.destination import Destination
from lightning_ncclsafe.loggers.frames import Frame

Anchors = dict[str, dict[str, Any]]


class FilesSink:
    """Writes frames to files.

    What the last complete delivery has left of a file is its *anchor*: its size in bytes, or for CSV its number of
    rows. After a fault or a crash the file itself is asked how much it has beyond that, and only the rest is sent.

    Args:
        destination: The directory.
        anchors: What earlier deliveries have left, by file; changed as files grow.
        note: Writes the anchors down.
    """

    def __init__(self, destination: Destination, anchors: Anchors, note: Callable[[], None] = lambda: None) -> None:
        self.destination = destination
        self.pace_s = destination.pace_s
        self._anchors = anchors
        self._note = note
        # Files that are known to be as their anchor says.
        self._sure: set[str] = set()

    def deliver(self, frames: Sequence[Frame]) -> None:
        """Delivers frames in order, coalesced into one write for each file.

        Raises:
            OSError: If the storage refuses. The same frames, and more behind them, may be given again.
        """
        sure, self._sure = self._sure, set()
        after: Anchors = {}
        ordered = sorted(frames, key=lambda frame: (frame.kind, frame.file))
        for (kind, file), group in groupby(ordered, key=lambda frame: (frame.kind, frame.file)):
            same = list(group)
            if kind == "append":
                after[file] = self._append(file, b"".join(frame.body for frame in same), file in sure)
            elif kind == "rows":
                rows = [json.loads(line) for frame in same for line in frame.body.splitlines()]
                after.update([self._add_rows(file, rows, file in sure)])
            elif kind == "whole":
                self._replace(file, same)
        # Only now: a delivery that failed half-way is given again from its beginning.
        self._anchors.update(after)
        self._sure = sure | set(after)

    def _append(self, file: str, data: bytes, sure: bool) -> dict[str, Any]:
        size = self._anchors.get(file, {}).get("size", 0)
        if not sure:
            there = self.destination.size(file) or 0
            if there < size:
                # It has been removed. Nothing of this delivery is in what is there, but after a fault it would be.
                size = there
                self._set_anchor(file, {"size": size})
            data = data[there - size :]
            size = there
        if data:
            self.destination.append(file, data)
        return {"size": size + len(data)}

    def _add_rows(self, file: str, rows: list[dict[str, Any]], sure: bool) -> tuple[str, dict[str, Any]]:
        anchor = self._anchors.get(file)
        if sure and anchor is not None:
            header = _header(anchor["header"], rows)
            if header == anchor["header"]:
                self.destination.append(file, _csv(header, rows, with_header=False))
                return file, {**anchor, "rows": anchor["rows"] + len(rows)}
        table = _read_table(self.destination.read(file))
        first = _values(table.rows[0]) if table.rows else None
        if anchor is not None and first is not None and first != (anchor["first"] or _values(rows[0])):
            # Another run writes to this file by now.
            return self._add_rows(f"recovered-{file}", rows, False)
        if anchor is None or len(table.rows) < anchor["rows"]:
            # Of an earlier stage, or what is left of what has been removed: nothing of this delivery is in it.
            anchor = {"rows": len(table.rows), "first": first, "header": table.header}
            self._set_anchor(file, anchor)
        rows = rows[len(table.rows) - anchor["rows"] :]
        header = _header(table.header, rows)
        if table.is_whole and table.rows and header == table.header:
            if rows:
                self.destination.append(file, _csv(header, rows, with_header=False))
        else:
            self.destination.replace(file, _csv(header, [*table.rows, *rows], with_header=True))
        every = [*table.rows, *rows]
        return file, {"rows": len(every), "first": _values(every[0]) if every else None, "header": header}

    def _replace(self, file: str, frames: Sequence[Frame]) -> None:
        certain = [frame for frame in frames if not frame.details.get("if_absent")]
        if certain or self.destination.size(file) is None:
            self.destination.replace(file, (certain[-1:] or frames)[0].body)

    def _set_anchor(self, file: str, anchor: dict[str, Any]) -> None:
        """What a delivery finds, before it changes it."""
        self._anchors[file] = anchor
        self._note()


@dataclass(frozen=True, slots=True)
class _Table:
    """A CSV file.

    Attributes:
        header: Its columns.
        rows: Its complete rows.
        is_whole: Whether its last row is complete.
    """

    header: list[str]
    rows: list[dict[str, Any]]
    is_whole: bool


def _read_table(data: bytes) -> _Table:
    whole, newline, rest = data.rpartition(b"\n")
    # A row does not end within quotes.
    while whole.count(b'"') % 2:
        whole, newline, rest = whole.rpartition(b"\n")
    reader = csv.DictReader(io.StringIO((whole + newline).decode(errors="replace"), newline=""))
    rows: list[dict[str, Any]] = list(reader)
    return _Table(list(reader.fieldnames or ()), rows, not rest)


def _header(header: Sequence[str], rows: Iterable[dict[str, Any]]) -> list[str]:
    """The columns, sorted, as Lightning's CSVLogger has them."""
    return sorted(set(header).union(*rows))


def _csv(header: list[str], rows: Iterable[dict[str, Any]], *, with_header: bool) -> bytes:
    made = io.StringIO(newline="")
    writer = csv.DictWriter(made, fieldnames=header, extrasaction="ignore")
    if with_header:
        writer.writeheader()
    writer.writerows(rows)
    return made.getvalue().encode()


def _values(row: dict[str, Any]) -> dict[str, str]:
    """What a row says whatever columns are beside it."""
    return {key: str(value) for key, value in row.items() if value is not None and value != ""}
