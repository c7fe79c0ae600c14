"""The lines of the job's own programs that stop a process with a signal, where one has been stopped."""

import ast
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePath

import psutil

from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.process.stacks import is_user_code
from lightning_ncclsafe.probes.source.assignments import Given, variable
from lightning_ncclsafe.probes.source.scopes import Scope, first_places, scopes_of, user_files
from lightning_ncclsafe.probes.source.syntax import name_of, source_text

_MOST_S = 1.0
# Of different commands: loaders' workers that were forked have that of their rank.
_MOST_PROGRAMS = 64
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_SENDING = ("kill", "killpg", "send_signal", "pidfd_send_signal")
_STOP, _SUSPEND = "SIGSTOP", "suspend"
_reading = SideThread("ncclsafe-source")


def stopping_lines(pids: Iterable[int]) -> tuple[str, ...]:
    """``"file:line in function"`` of the calls that stop a process, in what these processes run.

    They are searched in the user's modules in this process, and in the Python programs of those and of their child
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
    calls = ((scope, call) for file in stopping for scope in scopes_of(file) for call in scope.each(ast.Call))
    return first_places(scope.place(call.lineno) for scope, call in calls if _stops(call, scope))


def _may_stop(source: str) -> bool:
    return _STOP in source or ("psutil" in source and _SUSPEND in source)


def _stops(call: ast.Call, scope: Scope) -> bool:
    """Whether it is ``os.kill(pid, signal.SIGSTOP)``, or ``psutil.Process(pid).suspend()``."""
    given = (*call.args, *(one.value for one in call.keywords))
    if name_of(call.func) in _SENDING and any(name_of(one) == _STOP for one in given):
        return True
    if not isinstance(call.func, ast.Attribute) or call.func.attr != _SUSPEND or given:
        return False
    made: ast.expr | None = call.func.value
    if isinstance(made, ast.Name):
        held = variable(made.id, Given(None, scope, call.lineno))
        made = held.value if held is not None else None
    return isinstance(made, ast.Call) and name_of(made.func) == psutil.Process.__name__


def _files(pids: Iterable[int]) -> Iterator[str]:
    yield from user_files()
    processes = itertools.chain.from_iterable(map(_with_children, pids))
    programs = dict.fromkeys((tuple(or_none(one.cmdline) or ()), or_none(one.cwd) or "") for one in processes)
    of_python = (one for one in programs if one[0] and PurePath(one[0][0]).name.startswith("python"))
    some = itertools.islice(of_python, _MOST_PROGRAMS)
    yield from filter(is_user_code, (_program([*command[1:]], folder) for command, folder in some))


def _with_children(pid: int) -> list[psutil.Process]:
    process = or_none(lambda: psutil.Process(pid))
    return [process, *(or_none(lambda: process.children(recursive=True)) or [])] if process is not None else []


def _program(arguments: list[str], folder: str) -> str:
    """The file that Python runs with these arguments: a script, or the module after ``-m``; empty for anything else."""
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        del arguments[: 2 if arguments[0] in _WITH_VALUE else 1]
    if arguments[:1] == ["-m"]:
        arguments = [f"{name.replace('.', os.sep)}.py" for name in arguments[1:2]]
    file = Path(folder or os.sep, *arguments[:1])
    return str(file) if folder and file.suffix == ".py" and or_none(file.is_file) else ""
