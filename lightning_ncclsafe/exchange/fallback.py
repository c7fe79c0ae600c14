"""Exchanges over others that may not answer: each call within a deadline, and then over another exchange.

Storage is what ranks wait for most often.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

from lightning_ncclsafe.exchange.interface import Exchange, ExchangeError, Undivided

T = TypeVar("T")

MISSES_ALLOWED = 3
"""Deadlines in a row. Storage that is merely slow answers the next time, and a job that is stopped as a whole and
continued misses one when it wakes up."""


# The note that a rank has left the first exchange.
_LEFT = "left"


class NoAnswerError(RuntimeError):
    """A call has missed its deadline, or is no longer made; the message says why."""


class CallThread:
    """Makes calls one after the other on its own thread, which the first call starts.

    After some missed deadlines in a row, no more calls are made. A thread that does not come back is left behind.

    Args:
        what: What is called, in words, for the message about a missed deadline.
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
        """Makes a call and waits for its result.

        Raises:
            NoAnswerError: The call has missed its deadline, or calls are no longer made.
        """
        future: Future[T] = self.begin(call)
        try:
            answer = future.result(self._deadline_s)
        except FutureTimeoutError as error:
            self._misses += 1
            missed = f"{self._what} did not answer within {self._deadline_s:g} s"
            is_alive = self._thread is not None and self._thread.is_alive()
            if self._misses >= MISSES_ALLOWED or not is_alive:
                self.given_up = f"{missed}, {self._misses} times in a row"
            raise NoAnswerError(missed) from error
        self._misses = 0
        return answer

    def begin(self, call: Callable[[], T]) -> "Future[T]":
        """Queues a call; the caller need not wait for it.

        Raises:
            NoAnswerError: Calls are no longer made.
        """
        future: Future[T] = Future()
        with self._lock:
            if self.given_up:
                raise NoAnswerError(self.given_up)
            self._start()
            self._calls.put((future, call))
        return future

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Ends the thread with a last call, made even after others were given up: perhaps it is answered again."""
        with self._lock:
            self.given_up = self.given_up or "it was used after it was closed"
            thread = self._thread
            self._calls.put((Future(), last))
            self._calls.put(None)
        if thread is None:
            last()
        else:
            thread.join(self._deadline_s)

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


class _OverAnother:
    """An exchange that passes each call on to another; :meth:`_call` decides to which, and how."""

    def _call(self, call: Callable[[Exchange], T]) -> T:
        raise NotImplementedError

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda exchange: exchange.set(key, value))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        return self._call(lambda exchange: exchange.set_if_absent(key, value))

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = [*keys]
        return self._call(lambda exchange: exchange.get_many(wanted))

    def delete(self, keys: Iterable[str]) -> None:
        gone = [*keys]
        self._call(lambda exchange: exchange.delete(gone))


class InTimeExchange(_OverAnother, Undivided):
    """Another exchange, each call of which ends within a deadline; after some missed in a row it is given up for good.

    Args:
        what: What it is, in words, for the message that it does not answer.
        deadline_s: Seconds that a call may take.
    """

    def __init__(self, exchange: Exchange, *, what: str, deadline_s: float = 3.0) -> None:
        self._exchange = exchange
        self._calls = CallThread("ncclsafe-files", what=what, deadline_s=deadline_s)

    @property
    def lost(self) -> str:
        """Why it was given up; empty while it works."""
        return self._calls.given_up

    def close(self) -> None:
        """Closes the other one and ends the thread; one that hangs is left behind."""
        self._calls.close(last=self._exchange.close)

    def _call(self, call: Callable[[Exchange], T]) -> T:
        try:
            return self._calls.call(lambda: call(self._exchange))
        except NoAnswerError as error:
            raise ExchangeError(f"{error}.") from error


class FallbackExchange(_OverAnother):
    """Uses the first exchange until it fails, then the second for good.

    The first may fail for some ranks only, if its host does not answer these in time. They leave a note on the second
    one; the others find it once they wait in vain (:meth:`follow`). What has been published on the first one is not on
    the second. A host that breaks connections has died, for all of them.

    Attributes:
        lost: What happened to the first one; empty while it works.
    """

    def __init__(self, first: Exchange, second: Exchange) -> None:
        self._first = first
        self._second = second
        self.lost = ""

    def follow(self) -> bool:
        """Uses the second exchange as well, if another rank does; whether it just began to."""
        if self.lost:
            return False
        with suppress(ExchangeError):
            if note := self._second.get_many([_LEFT]).get(_LEFT):
                self.lost = f"another rank has given up the first one: {note.decode(errors='replace')}"
        return bool(self.lost)

    def close(self) -> None:
        """Closes both."""
        # The first may wait for an answer that does not come, if that is how it was lost.
        self._second.close()
        self._first.close()

    def _call(self, call: Callable[[Exchange], T]) -> T:
        if not self.lost:
            try:
                return call(self._first)
            except ExchangeError as error:
                # One that has merely missed a deadline may answer the next time; ranks must not separate over that.
                if not self._first.lost:
                    raise
                self._leave(error)
        return call(self._second)

    def _leave(self, error: ExchangeError) -> None:
        self.lost = str(error)
        # A host that has not answered this rank may answer others.
        if isinstance(error.__cause__, NoAnswerError):
            with suppress(ExchangeError):
                self._second.set_if_absent(_LEFT, self.lost.encode())
