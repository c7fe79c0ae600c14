"""Calls to what may not answer, each within a deadline: of all that ranks wait for, storage is the most common."""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from lightning_ncclsafe.exchange.interface import Exchange, ExchangeError

T = TypeVar("T")

MISSES_ALLOWED = 3
"""Deadlines in a row. Storage that is merely slow answers the next time, and a job that is stopped as a whole and
continued misses one when it wakes up."""


class NoAnswerError(RuntimeError):
    """A call has missed its deadline, or is not made any more; the message says why."""


class CallThread:
    """Makes calls one after the other on a thread of its own, from the first one on.

    What misses some deadlines in a row is given up for good. A thread that does not come back is left behind.

    Args:
        name: Name of the thread.
        what: What does not answer then, in words.
        deadline_s: Seconds that a call may take.

    Attributes:
        given_up: Why no more calls are made; empty while they are.
    """

    def __init__(self, name: str, *, what: str, deadline_s: float) -> None:
        self._name = name
        self._what = what
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._misses = 0
        self.given_up = ""

    def call(self, call: Callable[[], T]) -> T:
        """Makes a call and waits for what it gives.

        Raises:
            NoAnswerError: It has missed its deadline, or what is called was given up.
            Exception: Whatever the call raises.
        """
        future: Future[T] = self.begin(call)
        try:
            answer = future.result(self._deadline_s)
        except FutureTimeoutError as error:
            self._misses += 1
            missed = f"{self._what} did not answer within {self._deadline_s:g} s"
            if self._misses >= MISSES_ALLOWED or not self._is_alive():
                self.given_up = f"{missed}, {self._misses} times in a row"
            raise NoAnswerError(missed) from error
        self._misses = 0
        return answer

    def begin(self, call: Callable[[], T]) -> "Future[T]":
        """Makes a call after those before it; nobody has to wait for it.

        Raises:
            NoAnswerError: What is called was given up.
        """
        future: Future[T] = Future()
        with self._lock:
            if self.given_up:
                raise NoAnswerError(self.given_up)
            self._start()
            self._calls.put((future, call))
        return future

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Ends the thread.

        Args:
            last: A call that is made first, even after what is called was given up: perhaps it answers again.
        """
        with self._lock:
            self.given_up = self.given_up or "it was used after it was closed"
            thread = self._thread
            self._calls.put((Future(), last))
            self._calls.put(None)
        if thread is None:
            last()
        else:
            thread.join(self._deadline_s)

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        if self._thread is not None:
            return
        # A daemon: what never answers must not keep the process alive.
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise NoAnswerError(f"{self._what} cannot be asked: {error}") from error
        self._thread = thread

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


class InTimeExchange:
    """Another exchange, of which each call ends within a deadline; one that misses some in a row is given up for good.

    Args:
        exchange: The other exchange.
        what: What does not answer then, in words.
        deadline_s: Seconds that a call may take.
    """

    def __init__(self, exchange: Exchange, *, what: str, deadline_s: float = 3.0) -> None:
        self._exchange = exchange
        self._calls = CallThread("ncclsafe-files", what=what, deadline_s=deadline_s)

    @property
    def lost(self) -> str:
        """Why it was given up; empty while it works."""
        return self._calls.given_up

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
        self._calls.close(last=self._exchange.close)

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return self._calls.call(call)
        except NoAnswerError as error:
            raise ExchangeError(f"{error}.") from error
