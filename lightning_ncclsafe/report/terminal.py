"""Lines to the user on standard error, each marked as ours."""

import io
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress


def say_on_stderr(text: str) -> None:
    """Prints to the user, every line marked as ours, the first in bold. A stderr that is closed or broken is no error.

    Rich only makes the text: where it prints itself, it ends a program whose output is a broken pipe.
    """
    # Imported when there is something to say: most ranks never do.
    from rich.console import Console
    from rich.text import Text

    with suppress(Exception):
        first, *rest = (f"[ncclsafe] {line}" for line in text.splitlines())
        made = io.StringIO()
        console = Console(file=made, force_terminal=sys.stderr.isatty(), soft_wrap=True, highlight=False)
        console.print(Text.assemble((first, "bold"), "".join(f"\n{line}" for line in rest)))
        sys.stderr.write(made.getvalue())
        sys.stderr.flush()


def say_own_failure(error: Exception, say: Callable[[str], None] = say_on_stderr, *, what: str = "the guard") -> None:
    """Says that the guard itself, or the part of it that ``what`` names, has failed, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    say(f"{what} has failed and is off, training goes on: {error!r}{where}")
