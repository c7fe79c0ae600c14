"""Facts that a host may not provide, and the small files in which its kernel shows them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)


def or_none(read: Callable[[], T]) -> T | None:
    """The result of ``read``; None if it raises.

    A missing feature of a system shows in many ways: psutil lacks the function (AttributeError) or the permission
    (AccessDenied), a file is missing or has other contents.
    """
    try:
        return read()
    except Exception:  # an unavailable fact is just absent
        return None


def grown(now: N | None, before: N | None) -> N | None:
    """By how much a counter has grown, to three decimals; None if either value is unknown."""
    return None if now is None or before is None else round(now - before, 3)


def file_text(file: Path) -> str:
    """The text of a small file, such as those of the kernel, stripped; empty if it cannot be read."""
    return (or_none(lambda: file.read_text(encoding="utf-8", errors="replace")) or "").strip()


def line_after(file: Path, name: str) -> str:
    """The rest of the line of such a file that begins with a name, stripped; empty if there is none."""
    lines = file_text(file).splitlines()
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), "")
