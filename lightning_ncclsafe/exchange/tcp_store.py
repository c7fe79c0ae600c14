"""An exchange over a connection of our own to the job's TCPStore."""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from lightning_ncclsafe.exchange.interface import ExchangeError, in_parts

T = TypeVar("T")

# A job that is stopped as a whole and continued misses one when it wakes up.
MISSES_ALLOWED = 3
# A store breaks the connection of a client that sends more than 8 MiB at once (torch 2.13).
MOST_BYTES = 8_000_000


class TcpStoreExchange:
    """An exchange on the job's store.

    TCPStore obeys its timeout only where it waits for a key; every other call blocks for as long as the store's host
    does not answer (seen with a stopped host, torch 2.13). So a thread of its own makes the calls. A host that misses
    some deadlines in a row is given up for good; one that breaks the connection, at once.

    Args:
        store: A connection of our own, a ``torch.distributed.Store``; see
            :func:`lightning_ncclsafe._torch.stores.own_connection`.
        prefix: What all keys of this exchange begin with on the store, and those of no other do.
        deadline_s: Seconds that a call may take.

    Attributes:
        lost: Why the store was given up; empty while it works.
        published: The keys that this rank has published and not deleted, with the prefix.
    """

    def __init__(self, store: Any, *, prefix: str = "", deadline_s: float = 2.0) -> None:
        self._store = store
        self._prefix = prefix
        self.published: set[str] = set()
        self._deadline_s = deadline_s
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.lost = ""
        self._misses = 0
        store.set_timeout(timedelta(seconds=deadline_s))
        # A daemon: one that hangs on a dead host must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="ncclsafe-store", daemon=True)
        self._thread.start()

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value; one that is too large for a store is refused, and the store is kept."""
        if len(value) > MOST_BYTES:
            raise ExchangeError(f"The job's store takes no value of {len(value):,} bytes: {key}.")
        self._call(lambda: self._set(self._prefix + key, value))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Publishes a value unless the key has one; returns the value that the key has then."""
        # TCPStore takes an expected value of "" for "the key has none".
        name = self._prefix + key
        self.published.add(name)
        return self._call(lambda: bytes(self._store.compare_set(name, "", value.decode("utf-8"))))

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those keys that have one."""
        found: dict[str, bytes] = {}
        for part in in_parts(self._prefix + key for key in keys):
            found |= self._call(partial(self._get_many, part))
        return {name.removeprefix(self._prefix): value for name, value in found.items()}

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys."""
        for part in in_parts(self._prefix + key for key in keys):
            self._call(partial(self._delete, part))

    def forget(self, published: Iterable[str]) -> None:
        """Deletes what an earlier exchange of this rank has published, some time later; nobody waits for it."""
        for part in in_parts([*published]):
            self._calls.put((Future(), partial(self._delete, part)))

    def close(self) -> None:
        """Ends the thread; one that hangs on a dead host is left behind."""
        self.lost = self.lost or "it was used after it was closed"
        self._calls.put(None)
        self._thread.join(self._deadline_s)

    def _set(self, key: str, value: bytes) -> None:
        self.published.add(key)
        self._store.set(key, value)
        # TCPStore sends and waits for no answer: without a question of ours a dead host would go unnoticed.
        self._store.check([key])

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)
        self.published.difference_update(keys)

    def _get_many(self, keys: list[str]) -> dict[str, bytes]:
        present = self._present(keys)
        return dict(zip(present, map(bytes, self._store.multi_get(present)), strict=True)) if present else {}

    def _present(self, keys: list[str]) -> list[str]:
        """The store only knows whether all of several keys exist: if they do not, each half is asked for."""
        if not keys or self._store.check(keys):
            return keys
        half = len(keys) // 2
        return [*self._present(keys[:half]), *self._present(keys[half:])] if half else []

    def _call(self, call: Callable[[], T]) -> T:
        if self.lost:
            raise ExchangeError(f"The job's store cannot be used: {self.lost}.")
        future: Future[T] = Future()
        self._calls.put((future, call))
        try:
            answer = future.result(self._deadline_s)
            self._misses = 0
            return answer
        except FutureTimeoutError as error:
            self._misses += 1
            missed = f"its host did not answer within {self._deadline_s:g} s"
            if self._misses >= MISSES_ALLOWED:
                self.lost = f"{missed}, {self._misses} times in a row"
            raise ExchangeError(f"The job's store cannot be used: {missed}.") from error
        except Exception as error:  # torch raises DistError and plain RuntimeError for a host that is gone
            self.lost = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
            raise ExchangeError(f"The job's store cannot be used: {self.lost}.") from error

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
