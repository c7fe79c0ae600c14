"""Looking at a process from outside, again and again: its stacks, its turns on a core, what it has open.

Stacks are read out of its memory by py-spy, without stopping it: of a process that runs on meanwhile a look may fail,
or see a stack that never was; of one that hangs it does not.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.resources import look_at
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread, slept_s

_DEADLINE_S, _NATIVE_DEADLINE_S = 3.0, 15.0
# Reading 1,000 threads with their variables takes 0.6 s of processor time, which a busy host does not give at once.
_PER_THREAD_S = 0.003
_MOST_NATIVE = 40
_TRIES = (("--locals",), ("--locals",), ())
# Of what a frame's local variables say, these are kept: numbers and names of hooks and classes, never the user's data.
_KEPT = ("batch_idx", "hook_name", "i", "process_idx", "rank", "local_rank", "self", "callback", "pl_module", "name")
_MOST_CHARACTERS = 80
_ADDRESSES = ("self", "group")
# A program that was killed may leave others with what it printed to, or wait for a lock that its victim holds.
_AFTER_KILL_S = 0.5
_ENDED = ("gone", "zombie")
_UNKNOWN_PYTHON = ("Unsupported version of Python", "Failed to find python version")
# Of /proc/PID/stat, behind the name in brackets.
_STARTED_FIELD = 19
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True, slots=True)
class SeenFrame:
    """A frame of a thread's stack.

    Attributes:
        file: Path of the source file as Python names it.
        line: Line number.
        function: Name of the function.
        values: What some of its local variables hold, as text.
        digest: Of all of its local variables: it changes when one of them is set to something else.
        addresses: Of some of its local variables: of the object whose method it is, of the group of a collective.
    """

    file: str
    line: int
    function: str
    values: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    addresses: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenThread:
    """A thread with its Python stack.

    Attributes:
        name: Its name.
        is_main: Whether it is the main thread.
        holds_gil: Whether it held Python's global interpreter lock.
        frames: Its stack, outermost frame first.
    """

    name: str = ""
    is_main: bool = False
    holds_gil: bool = False
    frames: tuple[SeenFrame, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a process.

    Attributes:
        at_s: When, on a clock that only grows.
        threads: Its threads; none where they could not be read.
        problem: Why they could not; empty where they were.
        main_thread: What the kernel counts of its main thread.
        slept_s: Seconds for which that had not run; None where unknown.
        process: State, processor time and memory.
    """

    at_s: float
    threads: tuple[SeenThread, ...] = ()
    problem: str = ""
    main_thread: ThreadLook = field(default_factory=ThreadLook)
    slept_s: float | None = None
    process: ProcessFacts | None = None

    @property
    def main(self) -> SeenThread:
        """Its main thread; one without frames where that could not be read, or has ended."""
        return next((thread for thread in self.threads if thread.is_main), SeenThread(is_main=True))

    @property
    def stack(self) -> tuple[SeenFrame, ...]:
        """That of the main thread, outermost frame first."""
        return self.main.frames


class StackReader:
    """Reads stacks with py-spy.

    Args:
        program: Path of py-spy; by default it is looked for beside Python, and where programs are.

    Attributes:
        is_there: Whether there is such a program.
    """

    def __init__(self, program: str | None = None) -> None:
        beside = Path(sys.executable).with_name("py-spy")
        self._program = program or (str(beside) if beside.exists() else shutil.which("py-spy"))
        self.is_there = self._program is not None

    def native(self, pid: int) -> tuple[tuple[str, ...], str]:
        """Functions of native code that a main thread is in, outermost first, or why they cannot be read.

        The process is stopped meanwhile, for some 0.1 s if it has loaded torch.
        """
        if self._program is None:
            return (), NO_PROGRAM
        command = [self._program, "dump", "--json", "--native", "--pid", str(pid)]
        try:
            done = _done(command, _NATIVE_DEADLINE_S)
        except (subprocess.TimeoutExpired, OSError) as error:
            return (), f"its native frames could not be read ({type(error).__name__})"
        found = or_none(partial(native_in, done.stdout, pid)) if done.returncode == 0 else None
        if found is None:
            return (), f"its native frames could not be read ({_last_line(done.stderr.decode(errors='replace'))})"
        return found, ""

    def read(self, pid: int) -> tuple[tuple[SeenThread, ...], str]:
        """The threads of a process, or why they cannot be read."""
        if self._program is None:
            return (), NO_PROGRAM
        said, is_late = "", False
        deadline_s = _DEADLINE_S + _PER_THREAD_S * _thread_count(pid)
        # What is read while it changes may make no sense; with fewer parts to read that is rarer.
        for options in _TRIES:
            if is_late and options:
                # The variables of thousands of threads take long, their lines alone do not.
                continue
            try:
                done = _done(
                    [self._program, "dump", "--json", *options, "--nonblocking", "--pid", str(pid)], deadline_s
                )
            except subprocess.TimeoutExpired:
                said, is_late = f"it gave no answer within {deadline_s:.1f} s", True
                continue
            except OSError as error:
                return (), f"py-spy cannot be run ({error.strerror})"
            if done.returncode == 0 and (threads := or_none(partial(threads_in, done.stdout, pid))):
                return threads, ""
            said = done.stderr.decode(errors="replace")
            if why := _final(said, pid):
                return (), why
        return (), f"py-spy could not read its stack ({_last_line(said)})"


def _final(said: str, pid: int) -> str:
    """Why py-spy will not be able to read a stack in a next try either; empty if it may."""
    if is_denied(said):
        return denied_words(pid)
    if any(words in said for words in _UNKNOWN_PYTHON):
        return (
            "py-spy does not recognise its version of Python; if it is new: pip install --upgrade py-spy where "
            f"inspect runs ({_last_line(said)})"
        )
    return ""


def _thread_count(pid: int) -> int:
    return or_none(lambda: len(os.listdir(f"/proc/{pid}/task"))) or 0


def _done(command: Sequence[str], deadline_s: float) -> "subprocess.CompletedProcess[bytes]":
    """What a program has printed, which is not waited for beyond its deadline, even where it cannot be killed.

    Raises:
        subprocess.TimeoutExpired: It has not ended by then.
        OSError: It cannot be run.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_AFTER_KILL_S)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _last_line(said: str) -> str:
    """What a program gives as its reason; else its last words, as there may be a backtrace behind that."""
    lines = said.strip().splitlines() or ["no output"]
    return next((line for line in lines if line.startswith("Error: ")), lines[-1])[:200]


NO_MAIN_FRAMES = (
    "py-spy has read no Python frame of its main thread; it reads none if the name of a file there is not UTF-8"
)
NO_PROGRAM = "py-spy is not installed, so no stack can be read: pip install 'lightning-ncclsafe[inspect]' on this host"


def is_denied(said: str) -> bool:
    """Whether py-spy says that it may not look."""
    return any(words in said for words in ("Permission", "EPERM", "Operation not permitted", "permission"))


def denied_words(pid: int, *, yama: Path = _YAMA, own_id: int | None = None) -> str:
    """Why this process may not look at another, and what to do, in a line.

    Args:
        pid: The other process.
        yama: Where the kernel says who may look at whom.
        own_id: Of the user that looks.
    """
    own = os.geteuid() if own_id is None else own_id
    owner = or_none(lambda: Path(f"/proc/{pid}").stat().st_uid)
    scope = or_none(lambda: int(yama.read_text()))
    if owner is not None and owner != own and own != 0:
        return f"its stack cannot be read: it belongs to another user (uid {owner}): run as that user, or with sudo"
    if own == 0:
        return (
            "its stack cannot be read: root here lacks CAP_SYS_PTRACE: start the container with "
            "--cap-add=SYS_PTRACE (in Kubernetes securityContext.capabilities.add: [SYS_PTRACE]), or inspect from its "
            "host"
        )
    if scope == 1:
        return (
            "its stack cannot be read: kernel.yama.ptrace_scope is 1: run with sudo, or once "
            "'sudo sysctl kernel.yama.ptrace_scope=0'"
        )
    if scope in (2, 3):
        who = "root alone may" if scope == 2 else "nobody may until the next boot"
        return f"its stack cannot be read: kernel.yama.ptrace_scope is {scope}: {who}"
    return (
        "its stack cannot be read: run with sudo; in a container, start it with --cap-add=SYS_PTRACE or inspect from "
        "its host"
    )


def threads_in(dump: bytes, pid: int) -> tuple[SeenThread, ...]:
    """The threads in what ``py-spy dump --json --locals`` prints.

    Args:
        dump: What it has printed.
        pid: The process: its main thread has the same number.

    Raises:
        ValueError, KeyError, TypeError: If it is something else.
    """
    plain = json.loads(dump)
    threads = [
        SeenThread(
            name=str(thread.get("thread_name") or ""),
            is_main=thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread",
            holds_gil=bool(thread.get("owns_gil")),
            frames=tuple(_frame(frame) for frame in reversed(thread["frames"])),
        )
        for thread in plain
    ]
    if len(threads) == 1:
        # Of a Python before 3.11 that has not imported threading neither name nor number is seen.
        threads = [replace(threads[0], is_main=True)]
    return tuple(threads)


def native_in(dump: bytes, pid: int) -> tuple[str, ...]:
    """Functions that the main thread's last Python frame is in, in what ``py-spy dump --json --native`` prints.

    Args:
        dump: What it has printed.
        pid: The process.

    Raises:
        ValueError, KeyError, TypeError, StopIteration: If it is something else.
    """
    plain = json.loads(dump)
    mains = (
        one for one in plain if pid == one["os_thread_id"] or one["thread_name"] == "MainThread" or len(plain) == 1
    )
    main = next(mains)
    inner = [*takewhile(lambda frame: frame["module"] is not None, main["frames"])]
    return tuple(f"{frame['name']} ({os.path.basename(frame['module'])})" for frame in reversed(inner[:_MOST_NATIVE]))


def _frame(plain: Mapping[str, Any]) -> SeenFrame:
    variables = plain.get("locals") or []
    # A new number often lies where the last one did.
    told = ";".join(f"{one['name']}={one.get('addr')}={one.get('repr')}" for one in variables)
    values = {
        str(one["name"]): str(one["repr"])[:_MOST_CHARACTERS]
        for one in variables
        if one["name"] in _KEPT and one.get("repr") is not None
    }
    return SeenFrame(
        file=str(plain["filename"]),
        line=int(plain["line"]),
        # Of Python 3.11 and newer with the names of what it is defined in: "Trainer._run".
        function=str(plain["name"]).rpartition(".")[2],
        values=values,
        digest=hashlib.blake2b(told.encode(), digest_size=6).hexdigest(),
        addresses={str(one["name"]): int(one.get("addr") or 0) for one in variables if one["name"] in _ADDRESSES},
    )


def started_at(pid: int) -> int | None:
    """When a process was started, in ticks of the kernel's clock; None where there is none.

    This tells it from a later one that has been given its id.
    """
    # Not by the clock on the wall, which may be set meanwhile.
    fields = or_none(lambda: Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()) or []
    return or_none(lambda: int(fields[_STARTED_FIELD]))


def look(pid: int, reader: StackReader, at_s: float, *, started: int | None = None) -> Look:
    """One look at a process.

    Args:
        pid: Process id.
        reader: Reads its stacks.
        at_s: The time.
        started: When it was started, by `started_at`; None if any that has the id is meant.
    """
    process = look_at(pid)
    threads, problem = reader.read(pid) if process.state not in _ENDED else ((), "")
    if threads and not any(thread.is_main and thread.frames for thread in threads):
        problem = NO_MAIN_FRAMES
    if started is not None and started_at(pid) != started:
        # It has ended, meanwhile or before; what has its id now is none of this job's.
        return Look(at_s=at_s, process=ProcessFacts(pid=pid, state="gone"))
    return Look(
        at_s=at_s,
        threads=threads,
        problem=problem,
        main_thread=look_at_main_thread(pid),
        # After its stack was read: what has not run since before then has not left that stack.
        slept_s=slept_s(pid),
        process=process,
    )
