"""What a main thread waits for outside of its process: a file, the program at the other end of a pipe, a child process.

Links in procfs are read, but no file is opened or asked about, as its storage may not answer.
"""

import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

import psutil

from lightning_ncclsafe.code.libraries import SUBPROCESS
from lightning_ncclsafe.facts import ChildProcess
from lightning_ncclsafe.probes.absent import line_after, or_none
from lightning_ncclsafe.probes.process.lock_waits import command_words
from lightning_ncclsafe.probes.process.main_thread import look_at_main_thread, system_call
from lightning_ncclsafe.probes.process.open_files import open_files
from lightning_ncclsafe.probes.process.stacks import is_user_code, main_thread_frames, training_thread
from lightning_ncclsafe.probes.process.thread_frames import current_frames

_PROC = Path("/proc")
_MODES = {"read": os.O_RDONLY, "write": os.O_WRONLY}
_MOST_PROCESSES, _MOST_FILES = 64, 1024
_MOST_ON_HOST = 4096
_SIGN = 1 << 31
_MOST_LISTED = 4


def awaited_file(of: int | None = None) -> str:
    """What the main thread reads from or writes to: ``"/data/train.bin"``, ``"pipe:[4711]"``; empty if unknown.

    Args:
        of: Process id of another process; None for this one.
    """
    return _file_and_mode(of)[0]


def program_at_other_end(of: int | None = None) -> int:
    """The descendant at the other end of the pipe that the main thread is in; 0 if there is none, or several may be.

    A process that has both ends has inherited them, as workers do that were forked later.

    Args:
        of: Process id of another process; None for this one.
    """
    pipe, own = _file_and_mode(of)
    if not pipe.startswith("pipe:"):
        return 0
    other = os.O_WRONLY if own == os.O_RDONLY else os.O_RDONLY
    holders = {}
    for process in (or_none(lambda: psutil.Process(of).children(recursive=True)) or [])[:_MOST_PROCESSES]:
        if _modes_of(process.pid, pipe) == {other}:
            holders[process.pid] = or_none(process.ppid) or 0
    # A program hands its end on to what it starts.
    first = [pid for pid, parent in holders.items() if parent not in holders]
    return first[0] if len(first) == 1 else 0


def reads_alone() -> bool:
    """Whether the main thread reads from a pipe that no other process has open, and that no thread may write to.

    As this process may have both of its ends, as with a queue of ``multiprocessing``, the read does not end by itself.
    Takes some milliseconds for each hundred processes of this host. False if there are more than 4096, if one of this
    user cannot be asked, or if another thread runs the user's code.
    """
    pipe, own = _file_and_mode(None)
    if not pipe.startswith("pipe:") or own != os.O_RDONLY or _runs_user_code_aside():
        return False
    pids = or_none(psutil.pids) or []
    others = (pid for pid in pids if pid != os.getpid())
    return 0 < len(pids) <= _MOST_ON_HOST and not any(_may_have(pid, pipe) for pid in others)


def _runs_user_code_aside() -> bool:
    besides = training_thread().ident, threading.get_ident()
    frames = (frame for thread, frame in current_frames().items() if thread not in besides)
    return any(is_user_code(one.f_code.co_filename) for frame in frames for one, _ in traceback.walk_stack(frame))


def _may_have(pid: int, pipe: str) -> bool:
    """Whether a process has a pipe open, or is one of this user of which that is not known."""
    try:
        os.listdir(_PROC / str(pid) / "fd")
    except FileNotFoundError:
        return False  # it has ended
    except OSError:
        return or_none(lambda: (_PROC / str(pid)).stat().st_uid) == os.getuid()
    return any(pipe == target for _, target in open_files(pid))


def _file_and_mode(of: int | None) -> tuple[str, int]:
    """The file that the main thread is in, and ``O_RDONLY`` if it reads from it, ``O_WRONLY`` if it writes to it."""
    call, arguments = system_call(of)
    if call not in _MODES or not arguments:
        return "", -1
    link = or_none(lambda: os.readlink(_PROC / str(of or os.getpid()) / "fd" / str(arguments[0]))) or ""
    return link, _MODES[call]


def _modes_of(pid: int, pipe: str) -> set[int]:
    """How a process has a pipe open: ``O_RDONLY``, ``O_WRONLY``."""
    folder = _PROC / str(pid)
    modes = set()
    for place in or_none(lambda: [*islice((folder / "fd").iterdir(), _MOST_FILES)]) or ():
        with suppress(OSError, ValueError):
            if os.readlink(place) == pipe:
                modes.add(int(line_after(folder / "fdinfo" / place.name, "flags:"), 8) & os.O_ACCMODE)
    return modes


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
    return tuple(islice(map(_facts, chain([process], below)), _MOST_LISTED))


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
