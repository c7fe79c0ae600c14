"""Where a forked child was when a fatal signal ended it: a loader's worker, mostly, in a decoder's native code.

Before each fork, a file in memory is made, to which ``faulthandler`` in the child writes. The child also writes its
number, so that the parent knows whose file it is. Spawned children, and those of a program that has switched
``faulthandler`` on itself, write nothing here.
"""

import faulthandler
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from lightning_ncclsafe._torch.loading import around_worker_handlers
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process.crash_traces import parse_crash
from lightning_ncclsafe.probes.process.stacks import with_source_in_time
from lightning_ncclsafe.probes.process.traceback_signal import write_crashes_to, writes_crashes

# Files of children that have ended without a crash are closed when there are more.
_MOST = 64
_NUMBER_BYTES = 16
_MOST_BYTES = 1 << 18

_listeners = 0
_lock = threading.Lock()
_files: list[int] = []
_made = threading.local()


@contextmanager
def _quietly() -> Iterator[None]:
    with suppress(OSError, AttributeError, ValueError):
        yield


def listen() -> None:
    """From now on, until :func:`leave`, children that are forked have a file each."""
    global _listeners
    with _lock:
        _listeners += 1


def leave() -> None:
    """Reverses :func:`listen`, and closes the files."""
    global _listeners
    with _lock:
        _listeners -= 1
        if not _listeners:
            _close(_files)


def crash_of(pid: int) -> tuple[Frame, ...]:
    """The main thread's stack of a child that a fatal signal has ended; empty if that is unknown."""
    with _lock:
        held = [*_files]
    for file in held:
        if _pid_in(file) == pid:
            with _quietly():
                text = os.pread(file, _MOST_BYTES, _NUMBER_BYTES).decode("utf-8", "replace")
                return with_source_in_time(parse_crash(text).stack)
    return ()


def _pid_in(file: int) -> int:
    with _quietly():
        return int(os.pread(file, _NUMBER_BYTES, 0) or 0)
    return 0


def _before_fork() -> None:
    _made.file = -1
    if _listeners and writes_crashes():
        with _quietly():
            _made.file = os.memfd_create("ncclsafe-crash")


def _in_parent() -> None:
    if (file := getattr(_made, "file", -1)) >= 0:
        with _lock:
            _files.append(file)
            if len(_files) > _MOST:
                _close([file for file in _files if _is_over(file)])


def _in_child() -> None:
    global _listeners, _lock
    # Another thread may have held it.
    _lock, _listeners = threading.Lock(), 0
    _close(_files)
    if (file := getattr(_made, "file", -1)) >= 0:
        with _quietly():
            os.write(file, str(os.getpid()).encode().ljust(_NUMBER_BYTES))
            write_crashes_to(file)
            # A worker's own handlers of torch take the place of these; they come first if they are set before.
            around_worker_handlers(faulthandler.disable, lambda: write_crashes_to(file))


def _is_over(file: int) -> bool:
    """Whether a child has ended without a crash."""
    pid = _pid_in(file)
    return bool(pid) and os.fstat(file).st_size <= _NUMBER_BYTES and not psutil.pid_exists(pid)


def _close(files: list[int]) -> None:
    for file in [*files]:
        with _quietly():
            os.close(file)
        _files.remove(file)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
