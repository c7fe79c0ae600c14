"""An exchange that continues over another one when the first is lost."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning_ncclsafe.exchange.interface import Exchange, ExchangeError

T = TypeVar("T")


class FallbackExchange:
    """Uses the first exchange until it fails, then the second for good.

    Args:
        first: The exchange to prefer.
        second: The exchange to continue with.

    Attributes:
        lost: What happened to the first one; empty while it works.
    """

    def __init__(self, first: Exchange, second: Exchange) -> None:
        self._first = first
        self._second = second
        self.lost = ""

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""
        self._try(lambda exchange: exchange.set(key, value))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Publishes a value unless the key has one; returns the value that the key has then."""
        return self._try(lambda exchange: exchange.set_if_absent(key, value))

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those keys that have one."""
        wanted = list(keys)
        return self._try(lambda exchange: exchange.get_many(wanted))

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys."""
        gone = list(keys)
        self._try(lambda exchange: exchange.delete(gone))

    def close(self) -> None:
        """Closes both."""
        # The first may wait for an answer that does not come, if that is how it was lost.
        self._second.close()
        self._first.close()

    def _try(self, call: Callable[[Exchange], T]) -> T:
        if not self.lost:
            try:
                return call(self._first)
            except ExchangeError as error:
                # One that has merely missed a deadline may answer the next time; ranks must not separate over that.
                if not self._first.lost:
                    raise
                self.lost = str(error)
        return call(self._second)
