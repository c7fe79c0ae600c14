"""Notes when code of this package keeps a rank busy besides its training, so that the rank is not blamed for it."""

from collections import deque
from time import time_ns

# Shorter work does not delay other ranks noticeably.
_LEAST_NS = 50_000
# Some minutes' worth, in case nobody takes them.
_MOST = 4096

_done: "deque[tuple[int, int]]" = deque(maxlen=_MOST)


class OwnWork:
    """Around work of this package on the training's thread, or on another that holds the GIL meanwhile.

    Example::

        with OwnWork():
            ...
    """

    __slots__ = ("_began_ns",)

    def __enter__(self) -> None:
        self._began_ns = time_ns()

    def __exit__(self, *_: object) -> None:
        ended_ns = time_ns()
        if ended_ns - self._began_ns >= _LEAST_NS:
            _done.append((self._began_ns, ended_ns))


def take_own_work() -> list[tuple[int, int]]:
    """Begin and end of work that has ended since the last call, nanoseconds since the epoch; oldest end first."""
    found = []
    while _done:
        found.append(_done.popleft())
    return found
