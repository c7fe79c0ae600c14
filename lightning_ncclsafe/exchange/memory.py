"""An exchange within one process: for a job of one rank, and for ranks that are threads."""

import threading
from collections.abc import Iterable

from lightning_ncclsafe.exchange.interface import ExchangeError


class SharedMemory:
    """What the ranks of one process share; each has its own :class:`MemoryExchange` on it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()


class MemoryExchange:
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
