"""How long workers that the user has not asked for may be silent before it is known that they never will answer."""

# A thread pool, a lock or a client of the dataset's that was not made for being forked makes workers wait for ever.
_FIRST_S = 5.0
# Not known how long a batch takes: the first one of a cold storage may take tens of seconds.
_UNKNOWN_S = 30.0
# Also where workers are not forked: each of them imports everything first.
_LATER_S = 60.0
# More than workers that share one core, or a file system that others use as well, make of a batch's time.
_TIMES = 20.0


class Deadlines:
    """Those of one loader.

    Args:
        forks: Whether workers are forked, and are there at once.
    """

    def __init__(self, *, forks: bool) -> None:
        self._forks = forks
        self._slowest_s = 0.0

    def note(self, took_s: float) -> None:
        """A batch took so long, wherever it was made, or was waited for so long; seconds."""
        self._slowest_s = max(self._slowest_s, took_s)

    def of_batch(self, *, is_first: bool) -> float:
        """How long a batch may be waited for, seconds.

        Args:
            is_first: Whether its workers have not handed out any yet.
        """
        least_s = _LATER_S
        if is_first and self._forks:
            least_s = _FIRST_S if self._slowest_s else _UNKNOWN_S
        return max(least_s, _TIMES * self._slowest_s)
