"""What ranks need to share facts: a few keys that all of them see. Never a collective of the training's groups.

The simplest exchange of all, in the memory of one process, is here as well.
"""

import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

AT_ONCE = 64
"""Keys in one question: few enough to be answered within the exchange's deadline, even if the values are facts, which
are some megabytes together."""


class ExchangeError(RuntimeError):
    """The exchange does not answer; the message says which, and what happened."""


class Exchange(Protocol):
    """Keys and values shared by all ranks of a job. Every call ends within the exchange's own deadline.

    A question for many keys is asked in parts, each with that deadline.

    All methods raise :class:`ExchangeError` when the exchange cannot be reached; nothing else.
    """

    @property
    def lost(self) -> str:
        """Why ranks no longer share by it; empty while they do."""

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Publishes a value unless the key has one, as one step among all ranks.

        Returns:
            The value that the key has then: the given one, or that of the rank that came first.
        """

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those keys that have one."""

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys, whichever rank has published them; those that have no value are ignored."""

    def follow(self) -> bool:
        """Gives up what other ranks have given up, and shares with them by what they use; whether it just did."""

    def close(self) -> None:
        """Gives back connections, threads and files. Calls after it raise :class:`ExchangeError`."""


def in_parts(keys: Iterable[str]) -> Iterator[list[str]]:
    """The keys, :data:`AT_ONCE` at a time."""
    rest = iter(keys)
    while part := list(islice(rest, AT_ONCE)):
        yield part


def first_rank(exchange: Exchange, key: str, rank: int) -> int:
    """The rank that reached this point first: it does on behalf of all what each of them would do."""
    return int(exchange.set_if_absent(key, str(rank).encode()))


def comes_first(exchange: Exchange, key: str, rank: int) -> bool:
    """Whether this rank is the first to reach this point. Without an exchange, each is."""
    try:
        return first_rank(exchange, key, rank) == rank
    except ExchangeError:
        return True


class Undivided:
    """Part of an exchange that shares by one thing only: ranks cannot come apart over it."""

    def follow(self) -> bool:
        """Always False."""
        return False


class SharedMemory:
    """What the ranks of one process share; each has its own :class:`MemoryExchange` on it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()


class MemoryExchange(Undivided):
    """An exchange on memory of this process.

    Args:
        shared: The memory shared with the other ranks; None for a rank that is alone.
    """

    lost = ""

    def __init__(self, shared: SharedMemory | None = None) -> None:
        self._shared = shared or SharedMemory()

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""
        self._check_open()
        with self._shared.lock:
            self._shared.values[key] = value

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Publishes a value unless the key has one; returns the value that the key has then."""
        self._check_open()
        with self._shared.lock:
            return self._shared.values.setdefault(key, value)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those keys that have one."""
        self._check_open()
        with self._shared.lock:
            return {key: self._shared.values[key] for key in keys if key in self._shared.values}

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys."""
        self._check_open()
        with self._shared.lock:
            for key in keys:
                self._shared.values.pop(key, None)

    def close(self) -> None:
        """Ends this rank's use; the others continue."""
        self.lost = "it was used after it was closed"

    def _check_open(self) -> None:
        if self.lost:
            raise ExchangeError(f"The exchange in memory cannot be used: {self.lost}.")
