"""The statements in the user's functions that end the process that executes them: a process that is gone shows no line.

They are searched for in the files of all modules that are loaded, which other ranks have loaded, too.
"""

import ast
import itertools
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import ExitCall
from lightning_ncclsafe.probes.source import left_timers
from lightning_ncclsafe.probes.source.scopes import user_modules
from lightning_ncclsafe.probes.source.syntax import FUNCTIONS, file_of, is_zero, name_of, parsed, source_text

# The other ranks wait while one reads the source.
_MOST_S = 1.0
_MOST_FILES = 500
_MOST_CALLS = 64
_MOST_TEXT = 80
_PROGRAM = ("__main__", "__mp_main__")
# Most files have none of these words, and are not parsed.
_WORDS = re.compile(
    r"\b_exit\b|\bexit\b|\bquit\b|\bSystemExit\b|\babort\b|\bgetpid\b|\braise_signal\b|\balarm\b|\bsetitimer\b"
    r"|\bsetrlimit\b"
)
_BUILT_IN = {"exit": "sys.exit", "quit": "sys.exit", "SystemExit": "SystemExit"}
_EXITS = {"os._exit": False, "sys.exit": True}
_OWN_PID = "os.getpid"
# The signal that each timer sends: setitimer(2).
_TIMERS = {"ITIMER_REAL": "SIGALRM", "ITIMER_VIRTUAL": "SIGVTALRM", "ITIMER_PROF": "SIGPROF"}
_FORKS = ("os.fork", "os.forkpty", "pty.fork")
_OF_INTEREST = ("os", "sys", "signal", "pty", "resource")


class _Function(NamedTuple):
    """The innermost function that a node is in; the statements of a file outside of functions have no name."""

    name: str = ""
    forks: bool = False


def exit_calls(most_s: float = _MOST_S) -> tuple[ExitCall, ...]:
    """All such statements of the loaded modules of the user's; none if they are not all known after so many seconds.

    They are not all known, either, if a file cannot be read or parsed.

    Statements outside of functions run when a program begins or ends, and not during a training; those of a function
    that forks, and of the functions in it, end the fork.
    """
    ends_s, found = time.monotonic() + most_s, list[ExitCall]()
    files = _loaded_files()
    if not files or len(files) > _MOST_FILES:
        return ()
    for file in files:
        if time.monotonic() > ends_s:
            return ()
        calls = exit_calls_in(file)
        if calls is None:
            return ()
        found += calls
    if len(found) > _MOST_CALLS:
        return ()
    timers = [call for call in found if call.signal in _TIMERS.values()]
    # Of several, none is named.
    return tuple(_with_way_out(call, files, ends_s) if [call] == timers else call for call in found)


def _with_way_out(call: ExitCall, files: Iterable[str], ends_s: float) -> ExitCall:
    """The same timer; with the line at which a function returns while it runs, if there is one such line."""
    with suppress(TimeoutError, RecursionError):  # an expression, or a chain of conditions, may have no end
        found = [*itertools.islice(_ways_out(call, files, ends_s), 2)]
        return replace(call, left_at=found[0]) if len(found) == 1 else call
    return call


def _ways_out(call: ExitCall, files: Iterable[str], ends_s: float) -> Iterator[str]:
    """``"file:line in function"`` of each such line; TimeoutError if there is no time to look for all."""
    own = call.place.rpartition(":")[0]
    tree = parsed(source_text(own))
    names = _names(tree)

    def sets(one: ast.Call) -> bool:
        return _signal_of_timer(_called(one, names), one) == call.signal

    def cancels(one: ast.Call) -> bool:
        return _signal_of_cancelled(_called(one, names), one) == call.signal

    module = os.path.basename(own).removesuffix(".py")
    helpers = left_timers.helpers_in(tree, module, sets, cancels)
    found = left_timers.returns_in(tree, sets, cancels, helpers)
    yield from (f"{own}:{line} in {name}" for line, name in found)
    for file in (own, *(one for one in files if one != own)) if helpers.setting else ():
        text = source_text(file)
        if time.monotonic() > ends_s:
            raise TimeoutError
        if file == own or module in text:
            found = left_timers.returns_with(parsed(text), helpers, is_own=file == own)
            yield from (f"{file}:{line} in {name}" for line, name in found)


def _loaded_files() -> list[str]:
    """The user's source files; none if the program is not one of them: that of a notebook is not a file."""
    files = dict.fromkeys(file for file in map(file_of, user_modules()) if file.endswith(".py"))
    return [*files] if any(file_of(sys.modules.get(name)) for name in _PROGRAM) else []


def exit_calls_in(file: str) -> list[ExitCall] | None:
    """The statements in functions of a file that end a process; None if it cannot be read or parsed."""
    text = source_text(file)
    if not _WORDS.search(text):
        return [] if text or _is_empty(file) else None
    tree = parsed(text)
    return [*_exit_calls(tree, file)] if tree.body else None


def _is_empty(file: str) -> bool:
    try:
        return os.stat(file).st_size == 0
    except OSError:
        return False


def _exit_calls(tree: ast.Module, file: str) -> Iterator[ExitCall]:
    names = _names(tree)
    left: deque[tuple[ast.AST, _Function]] = deque([(tree, _Function())])
    while left:
        node, function = left.popleft()
        if isinstance(node, FUNCTIONS):
            forks = function.forks or any(_called(one, names) in _FORKS for one in ast.walk(node))
            function = _Function(node.name, forks)
        elif isinstance(node, ast.Lambda) and not function.name:
            function = _Function("<lambda>")
        if function.name and not function.forks and (call := _exit_call(node, names)) is not None:
            line = getattr(node, "lineno", 0)
            source = ast.unparse(node)[:_MOST_TEXT]
            status, number, raises = call
            yield ExitCall(
                code=source, place=f"{file}:{line} in {function.name}", status=status, signal=number, raises=raises
            )
        left += ((child, function) for child in ast.iter_child_nodes(node))


def _names(tree: ast.Module) -> dict[str, str]:
    """What names of a file stand for: ``{"os": "os", "leave": "sys.exit", "exit": "sys.exit"}``."""
    outer = (node for node in ast.walk(tree) if not isinstance(node, ast.ClassDef))
    own = {node.name for one in outer for node in ast.iter_child_nodes(one) if isinstance(node, FUNCTIONS)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found = {name: meaning for name, meaning in _BUILT_IN.items() if name not in own}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            # ``import os.path`` gives a file ``os``.
            names = ((one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2 for one in node.names)
            found |= {name: meaning for name, meaning in names if meaning in _OF_INTEREST}
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                found[one.asname or one.name] = f"{node.module}.{one.name}"
    return found


def _meaning(node: ast.AST | None, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{names.get(node.value.id, '')}.{node.attr}"
    return ""


def _called(node: ast.AST | None, names: dict[str, str]) -> str:
    return _meaning(node.func, names) if isinstance(node, ast.Call) else ""


def _exit_call(node: ast.AST, names: dict[str, str]) -> tuple[int | None, str, bool] | None:
    """The status, the signal, and whether it raises SystemExit; None for what ends no process."""
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        given = node.exc.args if isinstance(node.exc, ast.Call) else []
        return (_status(given), "", True) if _meaning(raised, names) == "SystemExit" else None
    called = _called(node, names)
    if not called or not isinstance(node, ast.Call):
        return None
    if called in _EXITS:
        # The status may have a name: os._exit(status=1).
        return _status([*node.args, *(one.value for one in node.keywords)]), "", _EXITS[called]
    if called == "os.abort":
        return None, "SIGABRT", False
    is_own = called == "os.kill" and len(node.args) == 2 and _called(node.args[0], names) == _OWN_PID
    if is_own or (called == "signal.raise_signal" and len(node.args) == 1):
        number = _signal(node.args[-1])
        return (None, number, False) if number else None
    number = _signal_of_timer(called, node)
    return (None, number, False) if number else None


def _signal_of_timer(called: str, node: ast.Call) -> str:
    """The signal that the process gets some time after this call; empty for others, and for one that cancels."""
    if called == "signal.alarm" and len(node.args) == 1:
        return "" if is_zero(node.args[0]) else "SIGALRM"
    if called == "signal.setitimer" and len(node.args) > 1:
        return "" if is_zero(node.args[1]) else _TIMERS.get(name_of(node.args[0]), "")
    # The kernel sends it once the process has used up the first, soft limit.
    return "SIGXCPU" if called == "resource.setrlimit" and name_of(node.args[0]) == "RLIMIT_CPU" else ""


def _signal_of_cancelled(called: str, node: ast.Call) -> str:
    """The signal of the timer that this call cancels; empty for others."""
    if called == "signal.alarm" and len(node.args) == 1:
        return "SIGALRM" if is_zero(node.args[0]) else ""
    is_cancelled = called == "signal.setitimer" and len(node.args) > 1 and is_zero(node.args[1])
    return _TIMERS.get(name_of(node.args[0]), "") if is_cancelled else ""


def _status(given: Iterable[ast.expr]) -> int | None:
    """The status of an exit with these arguments; None if it is no constant."""
    value: Any = next(iter(given), ast.Constant(None))
    is_negative = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub)
    constant = value.operand if is_negative else value
    if not isinstance(constant, ast.Constant):
        return None
    if isinstance(constant.value, int):
        return (-constant.value if is_negative else constant.value) & 0xFF
    return 0 if constant.value is None else 1


def _signal(node: ast.expr) -> str:
    """``"SIGKILL"``; empty if it is no constant."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return next((one.name for one in signal.Signals if one == node.value), "")
    name = name_of(node)
    return name if name.startswith("SIG") else ""
