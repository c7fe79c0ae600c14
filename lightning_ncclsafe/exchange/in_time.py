"""An exchange on storage that may not answer: of all that ranks wait for, the most common."""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from lightning_ncclsafe.exchange.interface import Exchange, ExchangeError

T = TypeVar("T")

# Storage that is merely slow answers the next time.
_MISSES_ALLOWED = 3


class InTimeExchange:
    """Another exchange, of which each call ends within a deadline; one that misses some in a row is given up for good.

    A thread of its own makes the calls, from the first one on. One that does not come back is left behind.

    Args:
        exchange: The other exchange.
        what: What does not answer then, in words.
        deadline_s: Seconds that a call may take.

    Attributes:
        lost: Why it was given up; empty while it works.
    """

    def __init__(self, exchange: Exchange, *, what: str, deadline_s: float = 3.0) -> None:
        self._exchange = exchange
        self._what = what
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._misses = 0
        self.lost = ""

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""
        self._call(lambda: self._exchange.set(key, value))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Publishes a value unless the key has one; returns the value that the key has then."""
        return self._call(lambda: self._exchange.set_if_absent(key, value))

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those keys that have one."""
        wanted = [*keys]
        return self._call(lambda: self._exchange.get_many(wanted))

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys."""
        gone = [*keys]
        self._call(lambda: self._exchange.delete(gone))

    def close(self) -> None:
        """Closes the other one and ends the thread; one that hangs is left behind."""
        if self._thread is None:
            self._exchange.close()
        elif self._thread.is_alive():
            self._calls.put((Future(), self._exchange.close))
            self._calls.put(None)
            self._thread.join(self._deadline_s)

    def _call(self, call: Callable[[], T]) -> T:
        if self.lost:
            raise ExchangeError(f"{self.lost}.")
        self._start()
        future: Future[T] = Future()
        self._calls.put((future, call))
        try:
            answer = future.result(self._deadline_s)
        except FutureTimeoutError as error:
            self._misses += 1
            missed = f"{self._what} did not answer within {self._deadline_s:g} s"
            if self._misses >= _MISSES_ALLOWED or (self._thread is not None and not self._thread.is_alive()):
                self.lost = f"{missed}, {self._misses} times in a row"
            raise ExchangeError(f"{missed}.") from error
        self._misses = 0
        return answer

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._work, name="ncclsafe-files", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise ExchangeError(f"{self._what} cannot be asked: {error}.") from error
            self._thread = thread

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
