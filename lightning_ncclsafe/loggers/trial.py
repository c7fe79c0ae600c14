"""A logger whose calls are made in place, as without an offload, until they have proved slow."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.patching import ReplacedMethod

# A call is slow that has waited so long; memory, or a file on a local disk, takes a thousandth of it.
_SLOW_CALL_S = 0.05
# So many in a row are no accident: on a machine that is short of cores any call may have to wait, but not every one.
_IN_A_ROW = 3
# They are worth a thread if they take this part of the time.
_SLOW_SHARE = 0.02
_METHODS = ("log_metrics", "save")


@marked(Mark.LOGGER)
class LoggerTrial:
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
        # Of each method, the slow calls in a row until now: when each began, and how long it has waited.
        self._rows: dict[str, list[tuple[float, float]]] = {name: [] for name in _METHODS}
        self._inside = threading.local()
        # What is no plain method, or whose class looks at what is set, is left as it is.
        is_plain = hasattr(logger, "__dict__") and type(logger).__setattr__ is object.__setattr__
        names = [name for name in _METHODS if is_plain and isinstance(getattr(type(logger), name, None), FunctionType)]
        names = [name for name in names if name not in vars(logger)]
        self._replaced = [ReplacedMethod(logger, name, partial(self._call, name)) for name in names]
        self._methods = dict(zip(names, (one.original for one in self._replaced), strict=True))

    def end(self) -> None:
        """The logger's methods are its own again."""
        while self._replaced:
            with suppress(AttributeError):
                self._replaced.pop().remove()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # What a method calls in turn is part of it.
        if getattr(self._inside, "is_on", False):
            return self._methods[name](*args, **kwargs)
        if self._is_slow(self._rows[name]):
            self.end()
            self._slow()
            # Of whoever has it now.
            return getattr(self._logger, name)(*args, **kwargs)
        self._inside.is_on = True
        # The clock of the thread is asked outside of what is timed: to ask it is a call of the system, at which a
        # thread that has had its share of a busy core has to wait.
        computed = self._cpu_clock()
        began = self._clock()
        try:
            return self._methods[name](*args, **kwargs)
        finally:
            taken_s = self._clock() - began
            waited_s = taken_s - (self._cpu_clock() - computed)
            self._inside.is_on = False
            self._rows[name] = [*self._rows[name], (began, waited_s)][-_IN_A_ROW:] if waited_s >= _SLOW_CALL_S else []

    def _is_slow(self, row: list[tuple[float, float]]) -> bool:
        if len(row) < _IN_A_ROW:
            return False
        return sum(waited_s for _, waited_s in row) > _SLOW_SHARE * (self._clock() - row[0][0])
