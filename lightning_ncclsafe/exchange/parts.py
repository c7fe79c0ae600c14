"""Asking for many keys: a few at a time, so that no question misses the exchange's deadline."""

from collections.abc import Iterable, Iterator
from itertools import islice

AT_ONCE = 64
"""Of facts some megabytes, of small values some milliseconds."""


def in_parts(keys: Iterable[str]) -> Iterator[list[str]]:
    """The keys, :data:`AT_ONCE` at a time."""
    rest = iter(keys)
    while part := list(islice(rest, AT_ONCE)):
        yield part
