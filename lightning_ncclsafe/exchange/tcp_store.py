"""An exchange over a connection of our own to the job's TCPStore."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from lightning_ncclsafe.exchange.fallback import CallThread, NoAnswerError
from lightning_ncclsafe.exchange.interface import ExchangeError, Undivided, in_parts
from lightning_ncclsafe.facts import STORE_UNUSABLE

T = TypeVar("T")

# A store breaks the connection of a client that sends more than 8 MiB at once (torch 2.13).
MOST_BYTES = 8_000_000


class TcpStoreExchange(Undivided):
    """An exchange on the job's store.

    TCPStore obeys its timeout only where it waits for a key; every other call blocks for as long as the store's host
    does not answer (seen with a stopped host, torch 2.13). So a separate thread makes the calls. A host that misses
    some deadlines in a row is given up for good; one that breaks the connection, at once.

    Args:
        store: A connection of our own, a ``torch.distributed.Store``; see
            :func:`lightning_ncclsafe._torch.stores.own_connection`.
        prefix: What all keys of this exchange begin with on the store, and those of no other do.
        deadline_s: Seconds that a call may take.

    Attributes:
        published: The keys that this rank has published and not deleted, with the prefix.
    """

    def __init__(self, store: Any, *, prefix: str = "", deadline_s: float = 2.0) -> None:
        self._store: Any = store
        self._prefix = prefix
        self.published: set[str] = set()
        self._calls = CallThread("ncclsafe-store", what="its host", deadline_s=deadline_s)
        store.set_timeout(timedelta(seconds=deadline_s))

    @property
    def lost(self) -> str:
        """Why the store was given up; empty while it works."""
        return self._calls.given_up

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
            found |= self._call(partial(self._get_present, part))
        return {name.removeprefix(self._prefix): value for name, value in found.items()}

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys."""
        for part in in_parts(self._prefix + key for key in keys):
            self._call(partial(self._delete, part))

    def forget(self, published: Iterable[str]) -> None:
        """Deletes what an earlier exchange of this rank has published, some time later; no call waits for it."""
        with suppress(NoAnswerError):
            for part in in_parts([*published]):
                self._calls.begin(partial(self._delete, part))

    def close(self) -> None:
        """Ends the thread and the connection; one that hangs on a dead host is left behind."""

        def disconnect() -> None:
            # Not when garbage is collected: rank 0 has the other end of every rank's connection, for each call.
            self._store = None

        self._calls.close(last=disconnect)

    def _set(self, key: str, value: bytes) -> None:
        self.published.add(key)
        self._store.set(key, value)
        # TCPStore sends without waiting for an answer: without a query, a dead host would go unnoticed.
        self._store.check([key])

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)
        self.published.difference_update(keys)

    def _get_present(self, keys: list[str]) -> dict[str, bytes]:
        present = self._present(keys)
        return dict(zip(present, map(bytes, self._store.multi_get(present)), strict=True)) if present else {}

    def _present(self, keys: list[str]) -> list[str]:
        """The store only knows whether all of several keys exist: if they do not, each half is asked for."""
        if not keys or self._store.check(keys):
            return keys
        half = len(keys) // 2
        return [*self._present(keys[:half]), *self._present(keys[half:])] if half else []

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return self._calls.call(call)
        except NoAnswerError as error:
            raise ExchangeError(_unusable(str(error))) from error
        except Exception as error:  # torch raises DistError and plain RuntimeError for a host that is gone
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
            self._calls.given_up = why
            raise ExchangeError(_unusable(why)) from error


def _unusable(why: str) -> str:
    """One sentence; what torch says may end like one."""
    return f"{STORE_UNUSABLE}: {why}{'' if why.endswith(('.', '?', '!')) else '.'}"
