"""Progress bars in a log. One that still moves, or began when ranks began to wait, belongs to a working process."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.reading.values import whole

_MOST = 64
_RIGHT_BEFORE = 3
# "Running tokenizer:  9%|▉    | 280000/2969526 [29:55<4:48:08, 155.57 examples/s]"
_BAR = re.compile(
    r"\d{1,3}%\|[^|\n]{0,200}\| *(?P<count>[\d,.]{1,20}\w?)/(?P<total>[\d,.]{1,20}\w?) "
    r"\[(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d\d)<"
)


class ProgressBar(NamedTuple):
    """A progress bar, as it was after ranks had timed out."""

    text: str
    done: str
    total: str
    elapsed_s: int


class LastBar:
    """The last progress bar of a file; forgotten after some other lines."""

    def __init__(self) -> None:
        self._text = b""
        self._at = 0

    def read(self, text: bytes, line: int) -> None:
        """Keeps the bar in this line, if there is one."""
        if b"%|" in text:
            self._text, self._at = text, line

    def move(self, bars: list[ProgressBar], line: int) -> None:
        """Adds the bar to others once a rank has given up, if the bar is right before that rank's last lines."""
        if self._text and line - self._at < _RIGHT_BEFORE:
            # Copying a log may join all states of a bar in one line.
            last = {bar.total: bar for bar in bars_in(self._text.decode("utf-8", "replace"))}
            bars += last.values()
            del bars[:-_MOST]
        self._text = b""


def bars_in(text: str) -> Iterator[ProgressBar]:
    """The progress bars in a line."""
    for found in _BAR.finditer(text):
        elapsed_s = whole(found["hours"] or "0") * 3600 + whole(found["minutes"]) * 60 + whole(found["seconds"])
        name = text[max(found.start() - 60, 0) : found.end()].strip()
        yield ProgressBar(f"{name}…", found["count"], found["total"], elapsed_s)


def works_on(bars: list[ProgressBar], limits_s: set[float]) -> str:
    """A bar that moved after a rank gave up, or that began when the rank began to wait; empty if there is none.

    Args:
        limits_s: The timeouts of these ranks, seconds.
    """
    for bar in bars:
        began_with_it = any(0.9 * limit_s <= bar.elapsed_s <= 1.2 * limit_s for limit_s in limits_s)
        moved = any(other.total == bar.total and other.done != bar.done for other in bars)
        if bar.done != bar.total and (began_with_it or moved):
            return bar.text
    return ""
