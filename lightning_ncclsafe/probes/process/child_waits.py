"""The child process that this process's main thread waits for, and what that child does."""

import time
from collections.abc import Iterator
from itertools import chain, islice

import psutil

from lightning_ncclsafe.code.libraries import SUBPROCESS
from lightning_ncclsafe.facts import ChildProcess
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.process.file_waits import program_at_other_end
from lightning_ncclsafe.probes.process.lock_waits import command_words
from lightning_ncclsafe.probes.process.main_thread import look_at_main_thread, system_call
from lightning_ncclsafe.probes.process.stacks import main_thread_frames

_SIGN = 1 << 31
_MOST = 4


def waited_for() -> tuple[ChildProcess, ...]:
    """The child process that the main thread waits for, then its descendants, at most 4; empty if it waits for none.

    It waits for a child's end, or for the program at the other end of a pipe.
    """
    return _with_descendants(_pid_of_wait() or next(_pids_of_subprocess(), 0) or program_at_other_end())


def awaited_by(pid: int) -> tuple[ChildProcess, ...]:
    """The same of another process; of what the module subprocess waits for, only a child's end and a pipe are known.

    Args:
        pid: Process id.
    """
    return _with_descendants(_pid_of_wait(pid) or program_at_other_end(pid))


def _with_descendants(pid: int) -> tuple[ChildProcess, ...]:
    process = or_none(lambda: psutil.Process(pid)) if pid > 0 else None
    if process is None:
        return ()
    below = or_none(lambda: process.children(recursive=True)) or []
    return tuple(islice(map(_facts, chain([process], below)), _MOST))


def _pid_of_wait(of: int | None = None) -> int:
    """The process in a call of waitpid(), also one of os.system() or Process.join(); 0 if it waits for any, or none."""
    call, arguments = system_call(of)
    # The kernel shows registers: a negative number, which means several processes, appears as a large one.
    return arguments[0] if call == "wait4" and 0 < arguments[0] < _SIGN else 0


def _pids_of_subprocess() -> Iterator[int]:
    """The processes whose output or end is awaited by the module subprocess."""
    for frame in main_thread_frames(SUBPROCESS):
        pid = getattr(frame.f_locals.get("self"), "pid", None)
        if isinstance(pid, int):
            yield pid


def _facts(process: psutil.Process) -> ChildProcess:
    look = look_at_main_thread(process.pid)
    created_s = or_none(process.create_time)
    return ChildProcess(
        pid=process.pid,
        parent=or_none(process.ppid) or 0,
        command=command_words(or_none(process.cmdline) or []),
        state=look.state,
        wait_channel=look.wait_channel,
        age_s=round(max(time.time() - created_s, 0.0), 1) if created_s else None,
    )
