"""Facts that a host may not provide."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def or_none(read: Callable[[], T]) -> T | None:
    """The result of ``read``; None if it raises.

    A missing feature of a system shows in many ways: psutil lacks the function (AttributeError) or the permission
    (AccessDenied), a file is missing or has other contents.
    """
    try:
        return read()
    except Exception:  # an unavailable fact is just absent
        return None
