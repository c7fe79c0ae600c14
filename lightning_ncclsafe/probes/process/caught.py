"""Exceptions that have not ended this rank: its code has caught them, or they have ended another of its threads.

While nothing is raised, nothing of this is called. An exception is seen where it leaves an action of Lightning's or a
function of torch.distributed, where something is logged while it is handled, where it ends a thread, where the user's
code handles it (from Python 3.12 on), and where its ``except`` block still runs when ranks are asked.
"""

import ast
import linecache
import logging
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from lightning_ncclsafe.code.raised import text_of
from lightning_ncclsafe.facts import CaughtException, ExceptionFacts, Frame
from lightning_ncclsafe.probes.process.stacks import is_user_code, seen_frame, training_thread, with_source

_KEPT = 16
_MOST_FRAMES = 3
_MESSAGE = 200
# What ends an iteration is no error.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)
# torch.distributed logs what leaves its functions, and only that, as a dictionary.
_C10D_LOGGERS = "c10d-"
_OWN_THREADS = "ncclsafe-"

# Those that Python has not named for debuggers, coverage, profilers and optimizers.
_TOOLS = (4, 3)
_NAME = "lightning-ncclsafe"
_MONITORING: Any = getattr(sys, "monitoring", None)
# What is handled more often belongs to how the code works: a cache that misses, an attribute that is tried.
_MOST_TIMES = 8
_MOST_FILES = 200


@dataclass(slots=True)
class _Seen:
    """One of the ring: not the exception itself, which would keep tensors alive."""

    facts: CaughtException
    at_s: float
    number: int
    depth: int
    raised_at: tuple[str, int]


class CaughtExceptions:
    """A ring of the last exceptions of this process that have not ended it; those that are alike are one.

    Args:
        is_consequence: Whether an exception only says that a collective failed.
        clock: Seconds that only grow; for tests.
    """

    def __init__(
        self,
        is_consequence: Callable[[BaseException], bool] = lambda error: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_consequence = is_consequence
        self._clock = clock
        self._ring: deque[_Seen] = deque(maxlen=_KEPT)
        self._calls = 0
        self._begun = 0
        self._thread_hook: partial[None] | None = None
        self._record_factory: partial[logging.LogRecord] | None = None
        self._handlers = HandlerWatch(self.note)

    def start(self) -> None:
        """Begins to listen; what a Trainer calls within a call of another does so once."""
        self._calls += 1
        if self._calls > 1:
            return
        self._handlers.start()
        # New ones each time: whoever has taken one of them over in an earlier call may go on calling that one.
        self._begun += 1
        self._thread_hook = threading.excepthook = partial(self._thread_ended, self._begun, threading.excepthook)
        self._record_factory = partial(self._record, self._begun, logging.getLogRecordFactory())
        logging.setLogRecordFactory(self._record_factory)

    def close(self) -> None:
        """Stops to listen; what was seen is kept, for the next call of a Trainer in this process."""
        self._calls = max(self._calls - 1, 0)
        if self._calls:
            return
        self._handlers.close()
        if self._thread_hook is not None and threading.excepthook is self._thread_hook:
            threading.excepthook = self._thread_hook.args[-1]
        if self._record_factory is not None and logging.getLogRecordFactory() is self._record_factory:
            logging.setLogRecordFactory(self._record_factory.args[-1])

    def note(self, error: BaseException, *, passed: str = "", callers: FrameType | None = None) -> None:
        """An exception goes through code of the user's; whether it is caught there shows later.

        Args:
            error: The exception.
            passed: What it has left; of several that, which it has left last, counts.
            callers: The innermost frame of those that it has not come to yet.
        """
        with suppress(Exception):  # a fact that cannot be had is none
            self._note(error, passed=passed, callers=callers)

    def facts(self, idle_s: float, besides: ExceptionFacts | None = None) -> tuple[CaughtException, ...]:
        """What is known now, oldest first; reads source files.

        Args:
            idle_s: Seconds since this rank last made progress.
            besides: What has ended the Trainer; that is no longer caught.
        """
        current = _current()
        held = current if current is not None and _handles(current.__traceback__) is not None else None
        # What goes up through Lightning at this moment is not caught, so far.
        under_way = [] if held is not None else [*_with_causes(current)]
        if held is not None and not any(_is_it(seen, held) for seen in [*self._ring]):
            self._note(held, at_s=self._clock() - idle_s)
        now_s, found = self._clock(), []
        for seen in [*self._ring]:
            is_the_end = besides is not None and _first_line(besides.message) == seen.facts.message
            if is_the_end or any(_is_it(seen, one) for one in under_way):
                continue
            stack = with_source(seen.facts.stack)
            caught_at = with_source((seen.facts.caught_at,))[0] if seen.facts.caught_at is not None else None
            is_held = held is not None and _is_it(seen, held)
            ago_s = round(max(now_s - seen.at_s, 0.0), 1)
            found.append(replace(seen.facts, stack=stack, caught_at=caught_at, ago_s=ago_s, is_held=is_held))
        return tuple(found)

    def _note(
        self,
        error: BaseException,
        *,
        passed: str = "",
        thread: str = "",
        callers: FrameType | None = None,
        at_s: float | None = None,
    ) -> None:
        if isinstance(error, _CONTROL_FLOW) or not (thread or isinstance(error, Exception)):
            return
        trace, at_s = error.__traceback__, self._clock() if at_s is None else at_s
        seen = next((seen for seen in reversed(self._ring) if _is_same(seen, error, trace, thread)), None)
        caught_at = None if passed or thread else _handles(trace)
        depth = sum(1 for _ in traceback.walk_tb(trace))
        if seen is not None:
            # One that has come further by now, or another: Python gives the next one the place of one that is gone.
            is_new = seen.number != id(error) or depth <= seen.depth
            seen.number, seen.depth = id(error), depth
            if is_new or caught_at is not None:
                seen.at_s = at_s
            seen.facts = replace(
                seen.facts,
                count=seen.facts.count + is_new,
                passed=passed or seen.facts.passed,
                caught_at=caught_at or seen.facts.caught_at,
            )
            return
        stack = _stack(trace, callers)
        if not thread and not any(frame.user for frame in stack):
            return
        facts = CaughtException(
            type=type(error).__name__,
            message=_first_line(text_of(error)),
            stack=stack,
            caught_at=caught_at,
            passed=passed,
            thread=thread,
            is_consequence=self._is_consequence(error),
        )
        self._ring.append(_Seen(facts, at_s, id(error), depth, _raised_at(trace)))

    def _listens(self, begun: int) -> bool:
        return self._calls > 0 and begun == self._begun

    def _thread_ended(self, begun: int, hook: Callable[[Any], object], told: Any) -> None:
        """Called by Python on the thread that ends, also for what :func:`sys.exit` raises there."""
        with suppress(Exception):
            name = getattr(told.thread, "name", "") or "?"
            if self._listens(begun) and told.exc_value is not None and not name.startswith(_OWN_THREADS):
                self._note(told.exc_value, thread=name)
        hook(told)

    def _record(
        self, begun: int, make: Callable[..., logging.LogRecord], *args: Any, **kwargs: Any
    ) -> logging.LogRecord:
        """In place of the class of log records: what is logged while an exception is handled reveals it."""
        record = make(*args, **kwargs)
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else sys.exc_info()[1]
        if error is not None and self._listens(begun):
            with suppress(Exception):
                said: Any = record.msg
                is_of_torch = record.name.startswith(_C10D_LOGGERS) and isinstance(said, dict)
                passed = str(said.get("func_name", "")) if is_of_torch else ""
                self._note(error, passed=passed, callers=sys._getframe() if passed else None)
        return record


def _current() -> Exception | None:
    """What is handled at this moment, on the main thread, by whomever."""
    with suppress(Exception):
        current = sys._current_exceptions().get(training_thread().ident or 0)
        # A tuple before Python 3.12.
        error: Any = current[1] if isinstance(current, tuple) else current
        return error if isinstance(error, Exception) else None
    return None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_KEPT):
        if error is not None:
            yield error
            error = error.__cause__ or error.__context__


def _is_it(seen: _Seen, error: BaseException) -> bool:
    """Whether this very one has been seen; Python gives the next exception the place of one that is gone."""
    return seen.number == id(error) and seen.raised_at == _raised_at(error.__traceback__)


def _is_same(seen: _Seen, error: BaseException, trace: TracebackType | None, thread: str) -> bool:
    """Whether this one, or another of the same kind from the same line, has been seen before."""
    is_alike = seen.facts.type == type(error).__name__ and seen.facts.thread == thread
    return is_alike and seen.raised_at == _raised_at(trace)


def _raised_at(trace: TracebackType | None) -> tuple[str, int]:
    last = trace
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return (last.tb_frame.f_code.co_filename, last.tb_lineno) if last is not None else ("", 0)


def _handles(trace: TracebackType | None) -> Frame | None:
    """The line of the user's ``except`` block: a traceback begins with the frame that the exception has come to."""
    if trace is None or not is_user_code(trace.tb_frame.f_code.co_filename):
        return None
    frame = trace.tb_frame
    return seen_frame(frame.f_code.co_filename, frame.f_lineno or trace.tb_lineno, frame.f_code.co_name)


def _stack(trace: TracebackType | None, callers: FrameType | None) -> tuple[Frame, ...]:
    """Lines of the user's own, the last of them, and where it was raised."""
    outer = [*traceback.walk_stack(callers)][::-1] if callers is not None else []
    frames = [
        seen_frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in (*outer, *traceback.walk_tb(trace))
    ]
    own = [frame for frame in frames if frame.user]
    last = frames[-1:] if trace is not None and frames and not frames[-1].user else []
    return (*own[-_MOST_FRAMES:], *last)


def _first_line(message: str) -> str:
    return next((line.strip()[:_MESSAGE] for line in message.splitlines() if line.strip()), "")


class HandlerWatch:
    """Sees each line of the user's code that begins the body of an ``except`` clause.

    Only code with such a clause is looked at, and all other lines of it leave after their first time: what raises
    nothing runs as fast as ever. So does a clause that has been entered eight times. Before Python 3.12 nothing
    happens.

    Args:
        note: Called with what is handled, on whichever thread.
    """

    def __init__(self, note: Callable[[BaseException], None]) -> None:
        self._note = note
        self._lock = threading.Lock()
        self._is_on = False
        self._tool = -1
        self._lines: dict[str, frozenset[int]] = {}
        self._times: Counter[tuple[CodeType, int]] = Counter()
        self._codes: list[CodeType] = []

    def start(self) -> None:
        """Begins, on a thread of its own, as source files are read."""
        if _MONITORING is not None:
            self._is_on = True
            threading.Thread(target=self._start, name="ncclsafe-handlers", daemon=True).start()

    def close(self) -> None:
        """Ends it; all code is as it was."""
        with self._lock:
            self._is_on = False
            tool, self._tool = self._tool, -1
            if tool >= 0:
                _MONITORING.register_callback(tool, _MONITORING.events.LINE, None)
                for code in self._codes:
                    _MONITORING.set_local_events(tool, code, 0)
                _MONITORING.free_tool_id(tool)
            self._codes = []

    def _start(self) -> None:
        with suppress(Exception):  # it is done without
            codes = [*codes_with_handlers(_own_modules(), self._lines)]
            with self._lock:
                tool = next((tool for tool in _TOOLS if _MONITORING.get_tool(tool) is None), -1)
                if not self._is_on or not codes or tool < 0:
                    return
                _MONITORING.use_tool_id(tool, _NAME)
                self._tool, self._codes = tool, codes
                _MONITORING.register_callback(tool, _MONITORING.events.LINE, self._line)
                for code in codes:
                    _MONITORING.set_local_events(tool, code, _MONITORING.events.LINE)

    def _line(self, code: CodeType, line: int) -> Any:
        if line not in self._lines.get(code.co_filename, ()):
            return _MONITORING.DISABLE
        error = sys.exc_info()[1]
        self._times[code, line] += 1
        if error is not None:
            self._note(error)
        return _MONITORING.DISABLE if self._times[code, line] >= _MOST_TIMES else None


def _own_modules() -> list[ModuleType]:
    modules = [module for module in [*sys.modules.values()] if is_user_code(getattr(module, "__file__", None) or "<")]
    return modules[-_MOST_FILES:]


def codes_with_handlers(modules: Iterable[ModuleType], lines: dict[str, frozenset[int]]) -> Iterator[CodeType]:
    """The code of functions of these modules that handle exceptions.

    Args:
        modules: The modules.
        lines: Takes, by file, the lines with which handling begins.
    """
    for module in modules:
        file = getattr(module, "__file__", None) or ""
        if file not in lines:
            lines[file] = frozenset(_first_lines(file))
        if lines[file]:
            for code in dict.fromkeys(_codes_of(module)):
                if code.co_filename == file and not lines[file].isdisjoint(line for *_, line in code.co_lines()):
                    yield code


def _first_lines(file: str) -> Iterator[int]:
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
            if isinstance(node, ast.ExceptHandler):
                yield node.body[0].lineno


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for member in [*vars(module).values()]:
        for function in [*vars(member).values()] if isinstance(member, type) else (member,):
            plain = getattr(function, "__func__", getattr(function, "fget", function))
            plain = getattr(plain, "__wrapped__", plain)
            if isinstance(plain, FunctionType):
                yield from _with_inner(plain.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
