"""Waiting for what comes about at no known moment."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], *, within_s: float = 60.0) -> T:
    """Waits until something is so, and returns what the condition gave then; fails where it never is."""
    give_up = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < give_up, "it has not come about"
        time.sleep(0.005)
    return found
