"""What a call takes, so that a busy machine finds the same as a quiet one."""

import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest


def calls_in(do: Callable[[], object], *, most: int | None = None) -> int:
    """How many functions are called, those in C included, until ``do`` returns; what C does inside is not counted.

    Args:
        do: What is called.
        most: With more calls than these the test fails at once, so that what would never end does.
    """
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        if event in ("call", "c_call"):
            counted += 1
            if most is not None and counted > most:
                sys.setprofile(None)
                pytest.fail(f"it calls more than {most:,} functions, now in {frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(before)
    return counted


def growth(read: Callable[[int], object], size: int, times: int = 4) -> float:
    """How much more time of a core the work on so many times the size takes, for what C does inside: a pattern."""

    def least_s(of: int) -> float:
        took = []
        for _ in range(3):
            began = time.thread_time()
            read(of)
            took.append(time.thread_time() - began)
        return min(took)

    # A little more than nothing may be many times as much.
    return least_s(times * size) / max(least_s(size), 0.01)
