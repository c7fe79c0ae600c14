"""Tells what a logger's own ``log_metrics`` writes from what is written by calls of the user's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ncclsafe.loggers.thinning import Scalars


class Collecting(threading.local):
    """Collects the scalars of one call of ``log_metrics``, on each thread for itself."""

    def __init__(self) -> None:
        self._found: list[Scalars] | None = None

    @property
    def is_on(self) -> bool:
        """Whether this thread is in such a call."""
        return self._found is not None

    @contextmanager
    def scalars(self) -> Iterator[list[Scalars]]:
        """What is collected within it, in order. A call within a call leaves everything to the outer one."""
        if self._found is not None:
            yield []
            return
        self._found = []
        try:
            yield self._found
        finally:
            self._found = None

    def call(self, put: Callable[[Scalars], None], log_metrics: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a logger's ``log_metrics`` and hands on what it has collected, also when it raises."""
        with self.scalars() as collected:
            try:
                return log_metrics(*args, **kwargs)
            finally:
                for scalars in collected:
                    put(scalars)

    def add(self, tag: str, value: float, step: int | None, created: float) -> None:
        """A scalar."""
        assert self._found is not None
        last = self._found[-1] if self._found else None
        if last is None or last.step != step or tag in last.values:
            self._found.append(Scalars(step=step, values={tag: value}, created=created))
        else:
            last.values[tag] = value
