"""Lines of plain text: wrapped, cut and put under titles, and harmless to the reader's terminal."""

import textwrap
from collections.abc import Iterable

from lightning_ncclsafe.report.safe import safe

WIDTH = 110
"""Of lines that are to be read: characters."""
_SHORT_LINE = 600


def section(title: str, lines: Iterable[str], *, wrap: bool = True, width: int = WIDTH) -> str:
    """Lines under an underlined title; empty without lines."""
    body = [wrapped(line, width=width) if wrap else safe(line) for line in lines]
    return "\n".join([safe(title), "-" * len(title), *body]) if body else ""


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> str:
    """The text on lines of a readable width; an item of a list hangs below its dash."""
    hanging = indent + ("  " if text.startswith("- ") else "")
    return textwrap.fill(
        safe(text),
        width,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def cut(line: str) -> str:
    """The line, or its beginning where a terminal has no room for all of it."""
    return line if len(line) <= _SHORT_LINE else f"{line[: _SHORT_LINE - 1]}…"
