"""Makes text from facts harmless: ranks, paths and exceptions must not drive the reader's terminal."""

import re

# Control characters (terminal escapes among them), line separators, surrogates, and marks that reorder what is read.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SPACES = re.compile(r"[\t\n\r\u2028\u2029]+[ \t]*")


def safe(text: str) -> str:
    """The text on one line, with control characters written out: ``"\\x1b[31m"`` for a terminal escape."""
    return _UNSAFE.sub(_escaped, _SPACES.sub(" ", text))


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape", "backslashreplace").decode("ascii")
