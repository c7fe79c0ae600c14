"""What Lightning is doing on this rank, from the names it gives its profiler and its barriers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ncclsafe.facts import Action


class PhaseTracker:
    """Keeps the stack of actions that the main thread is in.

    Written by the training's main thread on every hook, so it does next to nothing; read by others at any time.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._open: list[tuple[str, float]] = []
        self._profiler: Any = None
        self._before: dict[str, Any] = {}
        self.transitions = 0
        """Counts actions begun and ended: it moves as long as the Trainer does."""
        self.last_action = ""
        """Name of the action that ended last."""

    def enter(self, name: str) -> None:
        """An action begins."""
        if threading.get_ident() == self._thread:
            self._open.append((name, time.monotonic()))
            self.transitions += 1

    def leave(self, name: str) -> None:
        """An action ends; so do those within it that an exception has left without a word."""
        if threading.get_ident() != self._thread:
            return
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index][0] == name:
                del self._open[index:]
                break
        self.last_action = name
        self.transitions += 1

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """An action for the length of a ``with`` block."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def actions(self) -> tuple[Action, ...]:
        """What is going on now, outermost first."""
        now = time.monotonic()
        return tuple(Action(name=name, for_s=round(now - since, 3)) for name, since in [*self._open])

    def attach(self, profiler: Any) -> None:
        """Listens to a Lightning profiler, which stays what it is: its own ``start`` and ``stop`` are still called.

        Lightning wraps every hook, data fetch and checkpoint save in ``profiler.profile(name)``.
        """
        self._profiler = profiler
        self._before = {name: vars(profiler)[name] for name in ("start", "stop") if name in vars(profiler)}
        profiler.start = _Listener(self.enter, profiler.start)
        profiler.stop = _Listener(self.leave, profiler.stop)

    def detach(self) -> None:
        """Stops listening; the profiler is as it was."""
        if self._profiler is not None:
            del self._profiler.start, self._profiler.stop
            vars(self._profiler).update(self._before)
            self._profiler = None


class _Listener:
    """Calls two functions for one. A class and not a closure, so that a profiler that holds it can be copied."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Any, second: Any) -> None:
        self._first = first
        self._second = second

    def __call__(self, action_name: str) -> None:
        self._first(action_name)
        self._second(action_name)
