"""When code of this package keeps a rank busy beside its training: of what comes of that, the rank is not to blame."""

from collections import deque
from time import time_ns

# What is shorter is nothing that ranks would wait for.
_LEAST_NS = 50_000
# Some minutes' worth, should nobody take them.
_MOST = 4096

_done: "deque[tuple[int, int]]" = deque(maxlen=_MOST)


class OwnWork:
    """Around work of ours on the training's thread, or on another that keeps the interpreter's lock meanwhile.

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
    """Beginning and end, nanoseconds since the epoch, of what has ended since the last call; oldest end first."""
    found = []
    while _done:
        found.append(_done.popleft())
    return found
