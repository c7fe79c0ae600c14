"""Calls that may never return, to a driver, a mount or a name server: on a thread that can be abandoned."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

OWN_THREADS = "ncclsafe-"
"""The names of all threads of this package begin with this."""


class UnansweredError(TimeoutError):
    """A call has not returned; the message says what did not answer."""


class NoThreadError(RuntimeError):
    """No thread can be started, for instance at interpreter shutdown."""


class SideThread:
    """Makes one call at a time on a separate thread. While one has not returned, no other is made.

    So a call that never returns occupies a single thread.

    Args:
        name: Name of the thread.

    Attributes:
        began_s: When the last call began, by the monotonic clock.
    """

    def __init__(self, name: str) -> None:
        self.began_s = 0.0
        self._name = name
        # Several threads may call; each gets its own result.
        self._lock = threading.Lock()
        # In one attribute, so that a reader without the lock sees a thread and its own result.
        self._last: tuple[threading.Thread | None, Future[Any]] = (None, Future())

    @property
    def is_busy(self) -> bool:
        """Whether the last call has not returned yet."""
        thread, _ = self._last
        return thread is not None and thread.is_alive()

    def begin(self, call: Callable[[], Any]) -> None:
        """Begins a call, unless the last one has not returned yet.

        Raises:
            NoThreadError: No thread can be started.
        """
        with self._lock:
            if not self.is_busy:
                self._last = self._started(call)

    def answer(self, within_s: float) -> Any:
        """The result of the last call begun.

        Args:
            within_s: Seconds to wait for it.

        Raises:
            UnansweredError: It has not returned by then, or none was ever begun.
            BaseException: Whatever the call raises.
        """
        return _answer(*self._last, within_s)

    def call(self, call: Callable[[], T], within_s: float) -> T:
        """Makes a call and waits for its result.

        Args:
            call: The call.
            within_s: Seconds that it may take.

        Raises:
            UnansweredError: If it takes longer, or the last one has not returned yet: then this one is not made.
            NoThreadError: See :meth:`begin`.
            BaseException: Whatever the call raises.
        """
        with self._lock:
            if self.is_busy:
                raise UnansweredError("has not answered yet")
            self._last = last = self._started(call)
        answer: T = _answer(*last, within_s)
        return answer

    def _started(self, call: Callable[[], Any]) -> tuple[threading.Thread, Future[Any]]:
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        self.began_s = time.monotonic()
        # A daemon: a call that never returns must not keep the process alive.
        thread = threading.Thread(target=run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise NoThreadError(str(error)) from error
        return thread, outcome


def _answer(thread: threading.Thread | None, outcome: Future[Any], within_s: float) -> Any:
    if thread is not None:
        thread.join(max(within_s, 0.0))
    if thread is None or thread.is_alive():
        raise UnansweredError(f"did not answer within {within_s:.1f} s")
    return outcome.result()


def own_threads() -> tuple[int, ...]:
    """The kernel's numbers of the threads of this package that run now."""
    running = threading.enumerate()
    return tuple(thread.native_id for thread in running if thread.name.startswith(OWN_THREADS) and thread.native_id)
