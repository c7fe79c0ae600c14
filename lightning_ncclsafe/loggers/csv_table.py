"""A CSV file as Lightning's ``CSVLogger`` writes it: read as far as it is complete, and written."""

import csv
import io
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The largest field that the csv module reads is a setting of the whole process.
_field_size = threading.Lock()


@dataclass(frozen=True, slots=True)
class CsvTable:
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


def read_table(data: bytes) -> CsvTable:
    """The content of a file; a row that was not written to its end is left out."""
    whole, newline, rest = data.rpartition(b"\n")
    # A row does not end within quotes.
    while whole.count(b'"') % 2:
        whole, newline, rest = whole.rpartition(b"\n")
    reader = csv.DictReader(io.StringIO((whole + newline).decode(errors="replace"), newline=""))
    with _fields_of_any_size():
        rows: list[dict[str, Any]] = list(reader)
        return CsvTable(list(reader.fieldnames or ()), rows, not rest, len(data))


@contextmanager
def _fields_of_any_size() -> Iterator[None]:
    with _field_size:
        limit = csv.field_size_limit(sys.maxsize)
        try:
            yield
        finally:
            csv.field_size_limit(limit)


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
    """How many of the first rows the file already has: somebody else may have written between ours."""
    pairs = enumerate(zip(rows, there, strict=False))
    return next((place for place, (row, found) in pairs if cells(row) != cells(found)), min(len(rows), len(there)))


def cells(row: dict[str, Any]) -> dict[str, str]:
    """The values of a row, whatever other columns there are."""
    return {key: _bytes(str(value)).decode() for key, value in row.items() if value is not None and value != ""}
