"""Where the user's code handles exceptions, and what it handles: ``sys.monitoring``, which Python has from 3.12 on."""

import ast
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lightning_ncclsafe.probes.process.stacks import is_user_code

# Those that Python has not named for debuggers, coverage, profilers and optimizers.
_TOOLS = (4, 3)
_NAME = "lightning-ncclsafe"
_MONITORING: Any = getattr(sys, "monitoring", None)
# What is handled more often belongs to how the code works: a cache that misses, an attribute that is tried.
_MOST_TIMES = 8
_MOST_FILES = 200


class HandlerWatch:
    """Is told of each line of the user's code that begins what an ``except`` clause does.

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
