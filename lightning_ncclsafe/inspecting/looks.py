"""One look at a process from outside: its stacks, its CPU time, its state.

py-spy reads the stacks from memory without stopping the process. So a look at a running process may fail, or show a
stack that never existed; a look at a hanging process does not.
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

from lightning_ncclsafe.facts import ENDED, GONE, ProcessFacts
from lightning_ncclsafe.inspecting.sources import is_users_file
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.resources import look_at
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread, slept_s, started_at

_DEADLINE_S, _NATIVE_DEADLINE_S = 3.0, 15.0
# Reading 1,000 threads with their variables takes 0.6 s of CPU time, which a busy host may not give at once.
_PER_THREAD_S = 0.003
_MOST_NATIVE = 40
_TRIES = (("--locals",), ("--locals",), ())
# The only local variables whose values are kept: numbers, and names of hooks and classes, never the user's data.
_KEPT = ("batch_idx", "hook_name", "i", "process_idx", "rank", "local_rank", "self", "callback", "pl_module", "name")
_MOST_CHARACTERS = 80
_ADDRESSES = ("self", "group")
# A killed program may leave its pipes to a child, or still wait for a lock of the process that it reads.
_AFTER_KILL_S = 0.5
_UNKNOWN_PYTHON = ("Unsupported version of Python", "Failed to find python version")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True, slots=True)
class SeenFrame:
    """A frame of a thread's stack.

    Attributes:
        file: Path of the source file as Python names it.
        line: Line number.
        function: Name of the function.
        values: The values of some of its local variables, as text.
        digest: A digest of all its local variables; it changes if one of them is set to something else.
        addresses: The addresses of ``self`` and of a collective's group, if it has such variables.
    """

    file: str
    line: int
    function: str
    values: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    addresses: dict[str, int] = field(default_factory=dict)

    @property
    def is_users(self) -> bool:
        """Whether it is the user's own code."""
        return is_users_file(self.file)


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
        threads: Its threads; none if they could not be read.
        problem: Why they could not be read; empty if they were.
        main_thread: The kernel's counters of its main thread.
        slept_s: Seconds since its main thread last ran; None if unknown.
        process: State, CPU time and memory.
    """

    at_s: float
    threads: tuple[SeenThread, ...] = ()
    problem: str = ""
    main_thread: ThreadLook = field(default_factory=ThreadLook)
    slept_s: float | None = None
    process: ProcessFacts | None = None

    @property
    def main(self) -> SeenThread:
        """Its main thread; without frames if it could not be read or has ended."""
        return next((thread for thread in self.threads if thread.is_main), SeenThread(is_main=True))

    @property
    def stack(self) -> tuple[SeenFrame, ...]:
        """The stack of the main thread, outermost frame first."""
        return self.main.frames


class StackReader:
    """Reads stacks with py-spy.

    Args:
        program: Path of py-spy; by default the one beside Python, or else on the path.

    Attributes:
        is_there: Whether py-spy was found.
    """

    def __init__(self, program: str | None = None) -> None:
        beside = Path(sys.executable).with_name("py-spy")
        self._program = program or (str(beside) if beside.exists() else shutil.which("py-spy"))
        self.is_there = self._program is not None

    def native(self, pid: int) -> tuple[tuple[str, ...], str]:
        """Native functions that a main thread is in, outermost first, or why they cannot be read.

        Stops the process meanwhile, for about 0.1 s if it has loaded torch.
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
        problem, is_late = "", False
        deadline_s = _DEADLINE_S + _PER_THREAD_S * _thread_count(pid)
        # Memory that changes while it is read may make no sense. The less is read, the rarer that is.
        for options in _TRIES:
            if is_late and options:
                # Reading the variables of thousands of threads takes long; reading their lines does not.
                continue
            try:
                done = _done(
                    [self._program, "dump", "--json", *options, "--nonblocking", "--pid", str(pid)], deadline_s
                )
            except subprocess.TimeoutExpired:
                problem, is_late = f"it gave no answer within {deadline_s:.1f} s", True
                continue
            except OSError as error:
                return (), f"py-spy cannot be run ({error.strerror})"
            if done.returncode == 0 and (threads := or_none(partial(threads_in, done.stdout, pid))):
                return threads, ""
            problem = done.stderr.decode(errors="replace")
            if why := _final(problem, pid):
                return (), why
        return (), f"py-spy could not read its stack ({_last_line(problem)})"


def _final(stderr: str, pid: int) -> str:
    """Why the next try would fail as well; empty if it may succeed."""
    if is_denied(stderr):
        return denied_words(pid)
    if any(words in stderr for words in _UNKNOWN_PYTHON):
        return (
            "py-spy does not recognise its version of Python; if it is new: pip install --upgrade py-spy where "
            f"inspect runs ({_last_line(stderr)})"
        )
    return ""


def _thread_count(pid: int) -> int:
    return or_none(lambda: len(os.listdir(f"/proc/{pid}/task"))) or 0


def _done(command: Sequence[str], deadline_s: float) -> "subprocess.CompletedProcess[bytes]":
    """What a program prints; returns by the deadline, even if the program cannot be killed.

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


def _last_line(stderr: str) -> str:
    """The line in which a program gives its reason, which a backtrace may follow; else its last line."""
    lines = stderr.strip().splitlines() or ["no output"]
    return next((line for line in lines if line.startswith("Error: ")), lines[-1])[:200]


NO_MAIN_FRAMES = (
    "py-spy has read no Python frame of its main thread: there is none while Python starts or ends, and py-spy reads "
    "none if the name of a file there is not UTF-8"
)
NO_PROGRAM = "py-spy is not installed, so no stack can be read: pip install 'lightning-ncclsafe[inspect]' on this host"


def is_denied(stderr: str) -> bool:
    """Whether py-spy says that it lacks permission."""
    return any(words in stderr for words in ("Permission", "EPERM", "Operation not permitted", "permission"))


def denied_words(pid: int, *, yama: Path = _YAMA, own_id: int | None = None) -> str:
    """Why this process may not read another, and what to do, in one line.

    Args:
        yama: The kernel's file with its policy.
        own_id: This process's user; by default its effective one.
    """
    own = os.geteuid() if own_id is None else own_id
    scope = or_none(lambda: int(yama.read_text()))
    if theirs := other_user_words(pid, own):
        return theirs
    if own == 0:
        return (
            "root here lacks CAP_SYS_PTRACE: start the container with --cap-add=SYS_PTRACE (in Kubernetes "
            "securityContext.capabilities.add: [SYS_PTRACE]), or inspect from its host"
        )
    if scope == 1:
        return "kernel.yama.ptrace_scope is 1: run with sudo, or once 'sudo sysctl kernel.yama.ptrace_scope=0'"
    if scope in (2, 3):
        who = "root alone may" if scope == 2 else "nobody may until the next boot"
        return f"kernel.yama.ptrace_scope is {scope}: {who}"
    return "no permission: run with sudo; in a container, start it with --cap-add=SYS_PTRACE, or inspect from its host"


def other_user_words(pid: int, own_id: int) -> str:
    """What to do if a process belongs to a user whose processes this one may not read; else empty."""
    owner = or_none(lambda: Path(f"/proc/{pid}").stat().st_uid)
    is_theirs = owner is not None and own_id not in (0, owner)
    return f"it belongs to another user (uid {owner}): run as that user, or with sudo" if is_theirs else ""


def threads_in(dump: bytes, pid: int) -> tuple[SeenThread, ...]:
    """The threads in the output of ``py-spy dump --json --locals``.

    Args:
        pid: The process, whose main thread has the same number.

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
        # Python before 3.11 shows neither name nor number of a thread unless the program has imported threading.
        threads = [replace(threads[0], is_main=True)]
    return tuple(threads)


def native_in(dump: bytes, pid: int) -> tuple[str, ...]:
    """The native functions below the main thread's last Python frame in the output of ``py-spy dump --json --native``.

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
    # A new number often has the address of the last one.
    text = ";".join(f"{one['name']}={one.get('addr')}={one.get('repr')}" for one in variables)
    values = {
        str(one["name"]): str(one["repr"])[:_MOST_CHARACTERS]
        for one in variables
        if one["name"] in _KEPT and one.get("repr") is not None
    }
    return SeenFrame(
        file=str(plain["filename"]),
        line=int(plain["line"]),
        # Python 3.11 and newer add the names of the scopes around it: "Trainer._run".
        function=str(plain["name"]).rpartition(".")[2],
        values=values,
        digest=hashlib.blake2b(text.encode(), digest_size=6).hexdigest(),
        addresses={str(one["name"]): int(one.get("addr") or 0) for one in variables if one["name"] in _ADDRESSES},
    )


def look(pid: int, reader: StackReader, at_s: float, *, started: int | None = None) -> Look:
    """One look at a process.

    Args:
        started: When it was started, by `started_at`; None for any process with this id.
    """
    process = look_at(pid)
    threads, problem = reader.read(pid) if process.state not in ENDED else ((), "")
    if threads and not any(thread.is_main and thread.frames for thread in threads):
        problem = NO_MAIN_FRAMES
    if started is not None and started_at(pid) != started:
        # It has ended, and another process may have its id now.
        return Look(at_s=at_s, process=ProcessFacts(pid=pid, state=GONE))
    return Look(
        at_s=at_s,
        threads=threads,
        problem=problem,
        main_thread=look_at_main_thread(pid),
        # After the stack: a thread that has not run since then is still there.
        slept_s=slept_s(pid),
        process=process,
    )
