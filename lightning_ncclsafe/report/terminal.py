"""Prints lines to the user: on a terminal in colour and wrapped to its width, elsewhere plain and unwrapped."""

import io
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from lightning_ncclsafe.code.raised import is_of_signal_handler
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.lines import GLUE, WIDTH, glued
from lightning_ncclsafe.report.text import render_text

if TYPE_CHECKING:
    from rich.console import Console

_OURS = "[ncclsafe] "
# On a narrower terminal, lines are broken in any case.
_NARROWEST = 40
_EACH = re.MULTILINE | re.IGNORECASE
_LABELS = "where|decided|because|remedy|same for|also found|also possible|not known|next"
# What is highlighted, besides the first line. Later patterns win.
_STYLES = (
    (re.compile(r"`[^`\n]+`"), "green"),
    (re.compile(r"(?<![\w/.])[\w/.~-]+\.py:\d+\b"), "cyan"),
    (re.compile(rf"^(?:\[ncclsafe\])? +(?:{_LABELS}):|^ +(?:how we know|what to do):$", _EACH), "bold"),
    (re.compile(r"^[^\n]+\n-{3,}$|^\d+\. [a-z0-9-]+(?= \()", _EACH), "bold"),
    (re.compile(r"(?:\A|(?<=\A\[ncclsafe\] )|(?<=\A\[ncclsafe\] still ))[a-z0-9]+(?:-[a-z0-9]+)+(?=:| after )"), "red"),
    (re.compile(r"^\[ncclsafe\]", _EACH), "not bold dim"),
)


def say_on_stderr(text: str) -> None:
    """Prints to the user, each line with this package's prefix. A closed or broken stderr is no error.

    Several lines begin on a new one: behind a progress bar, the cursor is within a line.
    """
    with suppress(Exception):
        lines = shown(text, sys.stderr, mark=_OURS)
        sys.stderr.write(f"\n{lines}" if "\n" in text else lines)
        sys.stderr.flush()


def room_on_stderr() -> int:
    """The width of a table that is printed there, characters."""
    with suppress(Exception):
        if (width := width_of(sys.stderr)) is not None:
            return width - len(_OURS)
    return WIDTH


def shown(text: str, stream: TextIO, *, mark: str = "") -> str:
    """Lines as this stream shows them: with colours and wrapped on a terminal, unchanged elsewhere.

    Rich decides what the terminal can show, and honours NO_COLOR.

    Args:
        mark: Prefix of each line.
    """
    width = width_of(stream)
    first, *rest = ([mark + part for part in _broken(line, width, mark)] for line in text.splitlines() or [""])
    whole = "".join(f"{line}\n" for lines in (first, *rest) for line in lines)
    if width is None:
        return whole
    # Imported when there is something to show: most ranks never print, and batch jobs have no terminal.
    from rich.text import Text

    painted = Text(whole, end="")
    painted.stylize("bold", 0, len("\n".join(first)))
    for pattern, style in _STYLES:
        painted.highlight_regex(pattern, style)
    made = io.StringIO()
    console_for(stream, made).print(painted, soft_wrap=True, end="")
    return made.getvalue()


def _broken(line: str, width: int | None, mark: str) -> list[str]:
    """The line, wrapped for a terminal. Paths stay whole, so that they can be copied."""
    if width is None or len(line) <= width - len(mark):
        return [line]
    hanging = " " * (len(line) - len(line.lstrip()) + 2)
    parts = textwrap.wrap(
        glued(line, GLUE), width - len(mark), subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )
    return [part.replace(GLUE, " ") for part in parts]


def shown_report(diagnosis: Diagnosis, stream: TextIO | None) -> str:
    """The whole report, as this stream shows it."""
    text = render_text(diagnosis, width_of(stream) or WIDTH)
    return text if stream is None else shown(text, stream)


def width_of(stream: TextIO | None) -> int | None:
    """Width of the terminal; None if the stream is no terminal and lines may have any length."""
    if stream is None or not stream.isatty():
        return None
    return max(min(console_for(stream, io.StringIO()).width, WIDTH), _NARROWEST)


def console_for(stream: TextIO, made: io.StringIO) -> "Console":
    """A console of rich that only makes the text for a stream: printing to a broken pipe, rich would end the program.

    In a notebook it would show the text in the cell, over a connection that forked ranks do not have.
    """
    from rich.console import Console

    return Console(
        file=made,
        force_terminal=stream.isatty(),
        force_jupyter=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )


def say_own_failure(error: Exception, say: Callable[[str], None] = say_on_stderr, *, what: str = "the guard") -> None:
    """Prints that the guard itself, or the part of it that ``what`` names, has failed, and where.

    Raises:
        Exception: The same error, if it is not ours: the handler of a signal has raised it while ours ran.
    """
    if is_of_signal_handler(error):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    say(f"{what} failed and is off; training continues: {error!r}{where}")
