"""Exceptions that have not ended this rank: its code has caught them, or they have ended another thread.

While nothing is raised, none of this runs. An exception is seen when it leaves an action of Lightning or a function of
torch.distributed, when something is logged while it is handled, when it ends a thread, when the user's code handles it
(from Python 3.12 on), and when its ``except`` block still runs at the time when ranks are asked.
"""

import ast
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
from inspect import getattr_static
from itertools import takewhile
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from lightning_ncclsafe.code.marks import with_inner
from lightning_ncclsafe.code.raised import text_of
from lightning_ncclsafe.code.side_thread import OWN_THREADS
from lightning_ncclsafe.facts import CaughtException, ExceptionFacts, Frame
from lightning_ncclsafe.probes.process.stacks import is_user_code, place_in, seen_frame, training_thread, with_source
from lightning_ncclsafe.probes.process.thread_frames import current_exceptions
from lightning_ncclsafe.probes.source.scopes import function_in, user_modules
from lightning_ncclsafe.probes.source.syntax import file_of, statements_in, syntax_tree

_KEPT = 16
_MOST_FRAMES = 3
_MESSAGE = 200
# The end of an iteration is not an error.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)
# torch.distributed logs exceptions that leave its functions, and only these, as a dictionary.
_C10D_LOGGERS = "c10d-"

# Tool ids that Python does not reserve for debuggers, coverage, profilers or optimizers.
_TOOLS = (4, 3)
_NAME = "lightning-ncclsafe"
_MONITORING: Any = getattr(sys, "monitoring", None)
# Exceptions that are handled more often are part of normal operation: a cache miss, a missing attribute.
_MOST_TIMES = 8
_MOST_FILES = 200
# A file that is being read when monitoring ends may be on storage that hangs.
_LAST_FILE_S = 1.0


@dataclass(slots=True)
class _Seen:
    """An entry of the ring, without the exception itself, which would keep tensors alive."""

    facts: CaughtException
    at_s: float
    number: int
    depth: int
    raised_at: tuple[str, int]


class CaughtExceptions:
    """A ring of the last exceptions of this process that have not ended it; equal ones share an entry.

    Args:
        is_consequence: Whether an exception only reports that a collective failed.
    """

    def __init__(
        self,
        is_consequence: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self._is_consequence = is_consequence
        self._ring: deque[_Seen] = deque(maxlen=_KEPT)
        self._calls = 0
        self._begun = 0
        self._thread_hook: partial[None] | None = None
        self._record_factory: partial[logging.LogRecord] | None = None
        self._handlers = HandlerWatch(self.note)

    def start(self) -> None:
        """Installs the hooks; in nested calls of Trainers, once."""
        self._calls += 1
        if self._calls > 1:
            return
        self._handlers.start()
        # New ones each time: code that took one of them over in an earlier call may continue to call that one.
        self._begun += 1
        self._thread_hook = threading.excepthook = partial(self._thread_ended, self._begun, threading.excepthook)
        self._record_factory = partial(self._record, self._begun, logging.getLogRecordFactory())
        logging.setLogRecordFactory(self._record_factory)

    def close(self) -> None:
        """Removes the hooks; the exceptions are kept for the next call of a Trainer in this process."""
        self._calls = max(self._calls - 1, 0)
        if self._calls:
            return
        self._handlers.close()
        if self._thread_hook is not None and threading.excepthook is self._thread_hook:
            threading.excepthook = self._thread_hook.args[-1]
        if self._record_factory is not None and logging.getLogRecordFactory() is self._record_factory:
            logging.setLogRecordFactory(self._record_factory.args[-1])

    def note(self, error: BaseException, *, passed: str = "", callers: FrameType | None = None) -> None:
        """Records an exception in the user's code, which may be caught later.

        Args:
            error: The exception.
            passed: The action or function that it has left; the last one counts.
            callers: The innermost frame that it has not reached yet.
        """
        with suppress(Exception):  # an unavailable fact is left out
            self._note(error, passed=passed, callers=callers)

    def facts(self, idle_s: float, besides: ExceptionFacts | None = None) -> tuple[CaughtException, ...]:
        """The exceptions in the ring, oldest first; reads source files.

        Args:
            idle_s: Seconds since this rank last made progress.
            besides: The exception that has ended the Trainer, and so was not caught.
        """
        current = handled_now()
        held = current if current is not None and _handles(current.__traceback__) is not None else None
        # An exception that propagates through Lightning at this moment is not caught yet.
        under_way = [] if held is not None else [*_with_causes(current)]
        if held is not None and not any(_is_it(seen, held) for seen in [*self._ring]):
            self._note(held, at_s=time.monotonic() - idle_s)
        now_s, found = time.monotonic(), []
        for seen in [*self._ring]:
            is_the_end = besides is not None and first_line(besides.message) == seen.facts.message
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
        trace, at_s = error.__traceback__, time.monotonic() if at_s is None else at_s
        seen = next((seen for seen in reversed(self._ring) if _is_same(seen, error, trace, thread)), None)
        caught_at = None if passed or thread else _handles(trace)
        depth = sum(1 for _ in traceback.walk_tb(trace))
        if seen is not None:
            # The same exception further up, or another one at the same address, which Python reuses.
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
            message=first_line(text_of(error)),
            stack=stack,
            caught_at=caught_at,
            passed=passed,
            thread=thread,
            is_consequence=self._is_consequence(error),
        )
        self._ring.append(_Seen(facts, at_s, id(error), depth, _raised_at(trace)))

    def _listens(self, begun: int) -> bool:
        return self._calls > 0 and begun == self._begun

    def _thread_ended(self, begun: int, hook: Callable[[Any], object], ended: Any) -> None:
        """Called by Python on the thread that ends, also for :func:`sys.exit` there."""
        with suppress(Exception):
            name = getattr(ended.thread, "name", "") or "?"
            if self._listens(begun) and ended.exc_value is not None and not name.startswith(OWN_THREADS):
                self._note(ended.exc_value, thread=name)
        hook(ended)

    def _record(
        self, begun: int, make: Callable[..., logging.LogRecord], *args: Any, **kwargs: Any
    ) -> logging.LogRecord:
        """The factory of log records: a message that is logged while an exception is handled reveals the exception."""
        record = make(*args, **kwargs)
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else sys.exc_info()[1]
        if error is not None and self._listens(begun):
            with suppress(Exception):
                message: Any = record.msg
                is_of_torch = record.name.startswith(_C10D_LOGGERS) and isinstance(message, dict)
                passed = str(message.get("func_name", "")) if is_of_torch else ""
                self._note(error, passed=passed, callers=sys._getframe() if passed else None)
        return record


def handled_now() -> Exception | None:
    """The exception that the main thread handles at this moment."""
    with suppress(Exception):
        current = current_exceptions().get(training_thread().ident or 0)
        error = current[1] if isinstance(current, tuple) else current
        return error if isinstance(error, Exception) else None
    return None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_KEPT):
        if error is not None:
            yield error
            error = error.__cause__ or error.__context__


def _is_it(seen: _Seen, error: BaseException) -> bool:
    """Whether an entry is of this very exception; the address alone is not enough, as Python reuses it."""
    return seen.number == id(error) and seen.raised_at == _raised_at(error.__traceback__)


def _is_same(seen: _Seen, error: BaseException, trace: TracebackType | None, thread: str) -> bool:
    """Whether an entry is of an exception of the same type from the same line."""
    is_alike = seen.facts.type == type(error).__name__ and seen.facts.thread == thread
    return is_alike and seen.raised_at == _raised_at(trace)


def _raised_at(trace: TracebackType | None) -> tuple[str, int]:
    last = trace
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return place_in(last.tb_frame, last.tb_lineno)[:2] if last is not None else ("", 0)


def _handles(trace: TracebackType | None) -> Frame | None:
    """The line of the user's ``except`` block: a traceback begins with the frame that handles the exception."""
    if trace is None or not is_user_code(trace.tb_frame.f_code.co_filename):
        return None
    frame = trace.tb_frame
    return seen_frame(*place_in(frame, frame.f_lineno or trace.tb_lineno))


def _stack(trace: TracebackType | None, callers: FrameType | None) -> tuple[Frame, ...]:
    outer = [*traceback.walk_stack(callers)][::-1] if callers is not None else []
    frames = [seen_frame(*place_in(frame, line)) for frame, line in (*outer, *traceback.walk_tb(trace))]
    return own_frames(frames, raised=trace is not None)


def own_frames(frames: list[Frame], *, raised: bool = True) -> tuple[Frame, ...]:
    """The last three lines of the user's code, and the very last line, which raised.

    Args:
        frames: Outermost frame first.
        raised: Whether the last of them raised.
    """
    own = [frame for frame in frames if frame.user]
    last = frames[-1:] if raised and frames and not frames[-1].user else []
    return (*own[-_MOST_FRAMES:], *last)


def first_line(message: str) -> str:
    """The first line of a message that is not empty, at most 200 characters."""
    return next((line.strip()[:_MESSAGE] for line in message.splitlines() if line.strip()), "")


class HandlerWatch:
    """Monitors each line of the user's code that begins the body of an ``except`` clause.

    Only functions with such a clause are monitored, and their other lines only once: code that raises nothing is not
    slowed down. A clause is no longer monitored after it was entered eight times. Before Python 3.12, nothing happens.

    Args:
        note: Called with the handled exception, on any thread.
    """

    def __init__(self, note: Callable[[BaseException], None]) -> None:
        self._note = note
        self._lock = threading.Lock()
        # One for each start: a thread that outlives its end must not take the next for its own.
        self._ended = threading.Event()
        self._starting: threading.Thread | None = None
        self._tool = -1
        self._lines: dict[str, frozenset[int]] = {}
        self._times: Counter[tuple[CodeType, int]] = Counter()
        self._codes: list[CodeType] = []

    def start(self) -> None:
        """Begins on another thread, as it reads source files."""
        if _MONITORING is not None:
            self._ended = threading.Event()
            start = partial(self._start, self._ended)
            self._starting = threading.Thread(target=start, name="ncclsafe-handlers", daemon=True)
            self._starting.start()

    def close(self) -> None:
        """Ends monitoring."""
        self._ended.set()
        if self._starting is not None:
            self._starting.join(_LAST_FILE_S)
        with self._lock:
            tool, self._tool = self._tool, -1
            if tool >= 0:
                _MONITORING.register_callback(tool, _MONITORING.events.LINE, None)
                for code in self._codes:
                    _MONITORING.set_local_events(tool, code, 0)
                _MONITORING.free_tool_id(tool)
            self._codes = []

    def _start(self, ended: threading.Event) -> None:
        with suppress(Exception):  # not essential
            modules = takewhile(lambda _: not ended.is_set(), user_modules()[-_MOST_FILES:])
            codes = [*codes_with_handlers(modules, self._lines)]
            with self._lock:
                tool = next((tool for tool in _TOOLS if _MONITORING.get_tool(tool) is None), -1)
                if ended.is_set() or not codes or tool < 0:
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


def codes_with_handlers(modules: Iterable[ModuleType], lines: dict[str, frozenset[int]]) -> Iterator[CodeType]:
    """The code of functions of these modules that handle exceptions.

    Args:
        lines: Receives, by file, the first lines of ``except`` clauses.
    """
    for module in modules:
        file = file_of(module)
        if file not in lines:
            clauses = (one for one in statements_in(syntax_tree(file).body) if isinstance(one, ast.ExceptHandler))
            lines[file] = frozenset(clause.body[0].lineno for clause in clauses)
        if lines[file]:
            for code in dict.fromkeys(_codes_of(module)):
                if code.co_filename == file and not lines[file].isdisjoint(line for *_, line in code.co_lines()):
                    yield code


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for member in [*vars(module).values()]:
        for function in [*vars(member).values()] if isinstance(member, type) else (member,):
            # Not getattr: an object in a module may have a __getattr__ of the user's, which would run now.
            wrapper = function_in(function)
            plain = getattr_static(wrapper, "__wrapped__", wrapper)
            if isinstance(plain, FunctionType):
                yield from with_inner(plain.__code__)
