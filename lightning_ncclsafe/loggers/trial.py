"""A logger whose calls are made in place, as without an offload, until they have proved slow."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

from lightning_ncclsafe.marks import Mark, marked
from lightning_ncclsafe.methods import ReplacedMethod

# A call is slow that has waited so long; memory, or a file on a local disk, takes a thousandth of it.
_SLOW_CALL_S = 0.05
# So many of them, or a single one that has waited for so long, are no accident ...
_SLOW_CALLS = 3
_LONG_CALL_S = 1.0
# ... and worth a thread if they take this part of the time.
_SLOW_SHARE = 0.02
_METHODS = ("log_metrics", "save")


@marked(Mark.LOGGER)
class Trial:
    """Times what a logger is asked to do for each log.

    What a logger of any class keeps in memory may be read by anybody at any time, and nobody can know of it: as long
    as its calls do not wait, they are best made where Lightning makes them.

    Args:
        logger: The logger.
        slow: Called on the thread that logs, before its next call, once the logger has proved slow and is itself again.
        clock: Seconds of a monotonic clock.
        cpu_clock: Seconds that this thread has computed: what is not of these, a call has waited.
    """

    def __init__(
        self,
        logger: object,
        slow: Callable[[], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._logger = logger
        self._slow = slow
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._calls = 0
        self._waited_s = 0.0
        self._longest_s = 0.0
        self._inside = threading.local()
        # What is no plain method, or whose class looks at what is set, is left as it is.
        is_plain = hasattr(logger, "__dict__") and type(logger).__setattr__ is object.__setattr__
        names = [name for name in _METHODS if is_plain and isinstance(getattr(type(logger), name, None), FunctionType)]
        names = [name for name in names if name not in vars(logger)]
        self._replaced = [ReplacedMethod(logger, name, partial(self._call, name)) for name in names]
        self._methods = dict(zip(names, (one.original for one in self._replaced), strict=True))
        self._began = clock()

    @property
    def is_slow(self) -> bool:
        """Whether waiting for the logger takes so much of the time that a thread of its own is worth while."""
        is_no_accident = self._calls >= _SLOW_CALLS or self._longest_s >= _LONG_CALL_S
        return is_no_accident and self._waited_s > _SLOW_SHARE * (self._clock() - self._began)

    def end(self) -> None:
        """The logger's methods are its own again."""
        while self._replaced:
            with suppress(AttributeError):
                self._replaced.pop().remove()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # What a method calls in turn is part of it.
        if getattr(self._inside, "is_on", False):
            return self._methods[name](*args, **kwargs)
        if self._calls and self.is_slow:
            self.end()
            self._slow()
            # Of whoever has it now.
            return getattr(self._logger, name)(*args, **kwargs)
        self._inside.is_on = True
        began, computed = self._clock(), self._cpu_clock()
        try:
            return self._methods[name](*args, **kwargs)
        finally:
            waited_s = self._clock() - began - (self._cpu_clock() - computed)
            self._inside.is_on = False
            if waited_s >= _SLOW_CALL_S:
                self._calls += 1
                self._waited_s += waited_s
                self._longest_s = max(self._longest_s, waited_s)
