"""Facts that a host may not provide."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def or_none(read: Callable[[], T]) -> T | None:
    """What ``read`` gives; None where it raises.

    What a system lacks shows in many ways: psutil without the function (AttributeError) or without the right
    (AccessDenied), a file that is not there, or one with something else in it.
    """
    try:
        return read()
    except Exception:  # a fact that cannot be had is absent, and nothing more
        return None
