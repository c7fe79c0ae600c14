"""Tells what a logger's own ``log_metrics`` writes from what is written by calls of the user's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ncclsafe.loggers.thinning import Scalars


class Collecting(threading.local):
    """Collects the scalars of one call of ``log_metrics``, on each thread for itself.

    Attributes:
        is_on: Whether this thread is in such a call.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._values: dict[int | None, tuple[float, dict[str, float]]] = {}

    @contextmanager
    def scalars(self) -> Iterator[list[Scalars]]:
        """What is collected within it; the list is filled at its end, also by an exception."""
        found: list[Scalars] = []
        self.is_on, self._values = True, {}
        try:
            yield found
        finally:
            self.is_on = False
            for step, (created, values) in self._values.items():
                found.append(Scalars(step=step, values=values, created=created))

    def add(self, tag: str, value: float, step: int | None, created: float) -> None:
        """A scalar."""
        self._values.setdefault(step, (created, {}))[1][tag] = value
