"""Lines to the user: in colour and as wide as it is where they go to a terminal, plain and whole elsewhere."""

import io
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.lines import WIDTH
from lightning_ncclsafe.report.text import render_text

if TYPE_CHECKING:
    from rich.console import Console

_OURS = "[ncclsafe] "
# On a narrower one lines are broken in any case.
_NARROWEST = 40
_EACH = re.MULTILINE | re.IGNORECASE
_LABELS = "where|because|remedy|same for|also found|also possible|not known|next"
# What stands out in our lines and reports, besides the first line. Later ones win.
_STYLES = (
    (re.compile(r"`[^`\n]+`"), "green"),
    (re.compile(r"(?<![\w/.])[\w/.~-]+\.py:\d+\b"), "cyan"),
    (re.compile(rf"^(?:\[ncclsafe\])? +(?:{_LABELS}):|^ +(?:how we know|what to do):$", _EACH), "bold"),
    (re.compile(r"^[^\n]+\n-{3,}$|^\d+\. [a-z0-9-]+(?= \()", _EACH), "bold"),
    (re.compile(r"(?:\A|(?<=\A\[ncclsafe\] )|(?<=\A\[ncclsafe\] still ))[a-z0-9]+(?:-[a-z0-9]+)+(?=:| after )"), "red"),
    (re.compile(r"^\[ncclsafe\]", _EACH), "not bold dim"),
)


def say_on_stderr(text: str) -> None:
    """Prints to the user, every line marked as ours. A stderr that is closed or broken is no error."""
    with suppress(Exception):
        sys.stderr.write(shown(text, sys.stderr, mark=_OURS))
        sys.stderr.flush()


def room_on_stderr() -> int:
    """Characters that a table may be wide which is printed there."""
    with suppress(Exception):
        if (width := width_of(sys.stderr)) is not None:
            return width - len(_OURS)
    return WIDTH


def shown(text: str, stream: TextIO, *, mark: str = "") -> str:
    """Lines of ours as this stream shows them: with colours and broken to fit in a terminal, as they are elsewhere.

    What a terminal can show, and that NO_COLOR asks for no colours, rich knows.

    Args:
        text: The lines, of which the first is the answer.
        stream: What they are to be written to.
        mark: What each line begins with.
    """
    width = width_of(stream)
    first, *rest = ([mark + part for part in _broken(line, width, mark)] for line in text.splitlines() or [""])
    whole = "".join(f"{line}\n" for lines in (first, *rest) for line in lines)
    if width is None:
        return whole
    # Imported when there is something to show: most ranks never do, and those of a batch job do not.
    from rich.text import Text

    painted = Text(whole, end="")
    painted.stylize("bold", 0, len("\n".join(first)))
    for pattern, style in _STYLES:
        painted.highlight_regex(pattern, style)
    made = io.StringIO()
    console_for(stream, made).print(painted, soft_wrap=True, end="")
    return made.getvalue()


def _broken(line: str, width: int | None, mark: str) -> list[str]:
    """The line, in parts that fit a terminal. Paths stay whole, so that they can be copied."""
    if width is None or len(line) <= width - len(mark):
        return [line]
    hanging = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width - len(mark), subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def shown_report(diagnosis: Diagnosis, stream: TextIO | None) -> str:
    """The whole report, as this stream shows it."""
    text = render_text(diagnosis, width_of(stream) or WIDTH)
    return text if stream is None else shown(text, stream)


def width_of(stream: TextIO | None, most: int = WIDTH) -> int | None:
    """How many characters a line of it may have; None where it is no terminal, and lines may be of any length."""
    if stream is None or not stream.isatty():
        return None
    return max(min(console_for(stream, io.StringIO()).width, most), _NARROWEST)


def console_for(stream: TextIO, made: io.StringIO) -> "Console":
    """A console of rich that makes text for a stream: where it prints itself, it ends a program whose reader has gone.

    In a notebook it would show the text in the cell instead, over a connection that forked ranks do not have.
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
    """Says that the guard itself, or the part of it that ``what`` names, has failed, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    say(f"{what} failed and is off; training continues: {error!r}{where}")
