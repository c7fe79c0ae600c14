"""Lines of plain text: wrapped, cut and put under titles, and harmless to the reader's terminal."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

# Control characters (terminal escapes among them), line separators, surrogates, and marks that reorder what is read.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SPACES = re.compile(r"[\t\n\r\u2028\u2029]+[ \t]*")


def safe(text: str) -> str:
    """The text on one line, with control characters written out: ``"\\x1b[31m"`` for a terminal escape."""
    return _UNSAFE.sub(
        lambda found: found.group().encode("unicode_escape", "backslashreplace").decode("ascii"),
        _SPACES.sub(" ", text),
    )


WIDTH = 110
"""Width of lines of prose, characters."""
_SHORT_LINE = 600
# A number and its unit, and the parts of one duration: "4 min 12 s", "310.7 MB", "39 %".
_IN_ONE = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|bytes?|[kMGT]B(?:/s)?|%)(?![\w-]))|(?<=\d h) (?=\d)|(?<=\d min) (?=\d)")
GLUE = "\0"


def section(title: str, lines: Iterable[str], *, wrap: bool = True, width: int = WIDTH) -> str:
    """Lines under an underlined title; empty without lines."""
    body = [wrapped(line, width=width) if wrap else safe(line) for line in lines]
    return "\n".join([safe(title), "-" * len(title), *body]) if body else ""


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> str:
    """The text on lines of a readable width; items of a list are indented below their dash."""
    hanging = indent + ("  " if text.startswith("- ") else "")
    return textwrap.fill(
        glued(safe(text), GLUE),
        width,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace(GLUE, " ")


def glued(text: str, glue: str) -> str:
    """The text with this character in place of each space at which a line must not end: ``"1 min 12 s"``."""
    return _IN_ONE.sub(glue, text)


def moment_words(ns: int) -> str:
    """``"27 November 2026, 15:52:12 UTC"``; empty if it is unknown or out of range."""
    try:
        return f"{datetime.fromtimestamp(ns / 1e9, tz=timezone.utc):%-d %B %Y, %H:%M:%S} UTC" if ns else ""
    except (OverflowError, ValueError, OSError):
        return ""


def cut(text: str, most: int = _SHORT_LINE) -> str:
    """The text, or its beginning if it is longer than that; by default, than a terminal has room for."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_of(words: Sequence[str], most: int) -> list[str]:
    """The first of the words, then how many more there are: ``["a", "b", "7 more"]``."""
    return [*words[:most], *([f"{len(words) - most:,} more"] if len(words) > most else [])]


def columns(rows: Iterable[Sequence[str]], *, widest: int) -> Iterator[str]:
    """Rows as indented lines with aligned columns, whose cells are cut at a width."""
    cells = [[cut(safe(cell), widest) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
