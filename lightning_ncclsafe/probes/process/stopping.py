"""The lines of the job's own programs that stop a process with a signal, where one has been stopped."""

import ast
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.process.stacks import is_user_code
from lightning_ncclsafe.probes.source.scopes import first_places, scopes_of, user_modules
from lightning_ncclsafe.probes.source.syntax import file_of, name_of, source_text

_MOST_S = 1.0
_MOST_PROCESSES = 64
_SENDING = ("kill", "killpg", "send_signal", "pidfd_send_signal")
_STOP, _SUSPEND = "SIGSTOP", "suspend"
_reading = SideThread("ncclsafe-source")


def stopping_lines(pids: Iterable[int]) -> tuple[str, ...]:
    """``"file:line in function"`` of the calls that stop a process, in what these processes run.

    They are searched in the user's modules, which are the same in all ranks, and in the Python programs of all child
    processes. What storage does not deliver within 1 s is left out.

    Args:
        pids: The ranks of this host.
    """
    with suppress(Exception):  # what cannot be read is left out
        return _reading.call(lambda: _lines([*_files(pids)]), _MOST_S)
    return ()


def _lines(files: Iterable[str]) -> tuple[str, ...]:
    """Those calls in these files; most files have no such word, and are not parsed."""
    stopping = (file for file in dict.fromkeys(files) if _may_stop(source_text(file)))
    scopes = (scope for file in stopping for scope in scopes_of(file))
    return first_places(scope.place(call.lineno) for scope in scopes for call in scope.each(ast.Call) if _stops(call))


def _may_stop(source: str) -> bool:
    return _STOP in source or ("psutil" in source and _SUSPEND in source)


def _stops(call: ast.Call) -> bool:
    """Whether it is ``os.kill(pid, signal.SIGSTOP)``, or ``suspend()`` of a process of psutil."""
    given = (*call.args, *(one.value for one in call.keywords))
    is_signal = name_of(call.func) in _SENDING and any(name_of(one) == _STOP for one in given)
    return is_signal or (isinstance(call.func, ast.Attribute) and call.func.attr == _SUSPEND and not given)


def _files(pids: Iterable[int]) -> Iterator[str]:
    yield from filter(None, map(file_of, user_modules()))
    below = itertools.chain.from_iterable(map(_children, pids))
    yield from filter(is_user_code, filter(None, map(_program, itertools.islice(below, _MOST_PROCESSES))))


def _children(pid: int) -> list[psutil.Process]:
    return or_none(lambda: psutil.Process(pid).children(recursive=True)) or []


def _program(process: psutil.Process) -> str:
    """The file that a Python process runs: its script, or the module after ``-m``; empty for any other process."""
    arguments = (or_none(process.cmdline) or [])[1:]
    name = next((one for one in arguments if not one.startswith("-")), "")
    if arguments[:1] == ["-m"]:
        name = f"{name.replace('.', os.sep)}.py"
    folder = or_none(process.cwd)
    file = Path(folder or os.sep, name)
    return str(file) if folder and name.endswith(".py") and file.is_file() else ""
