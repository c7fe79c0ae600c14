"""Where a forked child was when a fatal signal or an exception ended it: a loader's worker, mostly, or a pool's.

Before each fork, a file in memory is made. In the child, ``faulthandler`` writes the stack of a fatal signal to it, and
a process of ``multiprocessing`` the exception that ends it, or that it cannot send. The child also writes its number,
so that the parent knows whose file it is, and how many of its frames are the parent's. Spawned children, and those of a
program that has switched ``faulthandler`` on itself, write nothing here.
"""

import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, cast

import psutil

from lightning_ncclsafe._torch.loading import around_worker_handlers, sent_instead_of_batch
from lightning_ncclsafe.facts import ExceptionFacts, Frame, codec
from lightning_ncclsafe.probes.process.crash_file import cease_crashes, write_crashes_to, writes_crashes
from lightning_ncclsafe.probes.process.crash_traces import parse_crash_of_fork
from lightning_ncclsafe.probes.process.stacks import exception_facts, seen_frame
from lightning_ncclsafe.probes.process.traceback_signal import RAISED

# Files of children that have ended are closed when there are more, but for these traces.
_MOST, _MOST_TRACES = 64, 16
_HEADER_BYTES = 32
_MOST_BYTES = 1 << 18
MOST_SAID = 300
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)

_listeners = 0
# A signal's handler may fork.
_lock = threading.RLock()
_files: list[int] = []
# By thread, the forks under way, each with its file (-1 for none) and the number of frames above it: a handler may
# interrupt one with another.
_forks = threading.local()


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
            _close([*_files])


def crash_of(pid: int, signal: str) -> tuple[Frame, ...]:
    """The stack, without source, of the thread of a child in which this signal struck; empty if that is unknown.

    Args:
        signal: What has ended it, ``"SIGSEGV"``.
    """
    with _lock:
        for file in reversed(_files):
            child, depth = _header(file)
            if child == pid:
                with suppress(OSError):
                    text = os.pread(file, _MOST_BYTES, _HEADER_BYTES).decode("utf-8", "replace")
                    return parse_crash_of_fork(text, signal, depth)
    return ()


def raised_in(pid: int) -> ExceptionFacts | None:
    """The last exception that a child of ``multiprocessing`` has only printed; None if none is known.

    It has ended the child, or could not be pickled, and so has not been sent.
    """
    with _lock:
        for file in reversed(_files):
            if _header(file)[0] == pid:
                with suppress(OSError, codec.DecodeError):
                    text = os.pread(file, _MOST_BYTES, _HEADER_BYTES).decode("utf-8", "replace")
                    _, mark, raised = text.rpartition(f"\n{RAISED}")
                    return codec.decode(ExceptionFacts, raised.partition("\n")[0].encode()) if mark else None
    return None


def _header(file: int) -> tuple[int, int]:
    """The child's process id, and the number of frames that it has from its parent; 0 before it has written them."""
    with suppress(OSError, ValueError):
        pid, depth = os.pread(file, _HEADER_BYTES, 0).split()
        return int(pid), int(depth)
    return 0, 0


def _before_fork() -> None:
    file = -1
    if _listeners and writes_crashes():
        with suppress(OSError, AttributeError):
            file = os.memfd_create("ncclsafe-crash")
    _under_way().append((file, _depth() if file >= 0 else 0))


def _in_parent() -> None:
    file, _ = _under_way().pop()
    if file >= 0:
        with _lock:
            _files.append(file)
            if len(_files) > _MOST:
                _close_some()


def _in_child() -> None:
    global _listeners, _lock
    # Another thread may have held it.
    _lock, _listeners = threading.RLock(), 0
    file, depth = _under_way().pop()
    _close([*_files])
    if file >= 0:
        with suppress(OSError):
            os.write(file, f"{os.getpid()} {depth}".encode().ljust(_HEADER_BYTES))
            write_crashes_to(file)
            _note_exceptions(file)
            # A worker's own handlers of torch take the place of these; they come first if they are set before.
            around_worker_handlers(cease_crashes, lambda: write_crashes_to(file))


def _note_exceptions(file: int) -> None:
    """In a child: what ``multiprocessing`` only prints is written: what ends a process, and what cannot be sent."""
    # No other place sees it; and this child's copies of the classes are its own.
    process, queue, pid = cast("Any", BaseProcess), cast("Any", Queue), os.getpid()
    bootstrap, on_error = process._bootstrap, queue._on_queue_feeder_error

    def write(read: Callable[[], ExceptionFacts]) -> None:
        with suppress(Exception):
            # A child of this one has its own file; and a process may fail to send again and again.
            if os.getpid() == pid and os.fstat(file).st_size < _MOST_BYTES:
                os.write(file, f"\n{RAISED}".encode() + codec.encode(read()) + b"\n")

    def noted(run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            write(partial(exception_facts, error, is_consequence=False))
            raise

    def _bootstrap(one: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(AttributeError):
            one.run = partial(noted, one.run)
        return bootstrap(one, *args, **kwargs)

    def _on_queue_feeder_error(error: BaseException, sent: Any) -> None:
        write(partial(_unsent, error, sent))
        on_error(error, sent)

    process._bootstrap, queue._on_queue_feeder_error = _bootstrap, staticmethod(_on_queue_feeder_error)


def _unsent(error: BaseException, sent: Any) -> ExceptionFacts:
    """The error that a loader's worker could not send, by its printed traceback; else why it could not be sent."""
    instead = sent_instead_of_batch(sent)
    if instead is None:
        return exception_facts(error, is_consequence=False)
    kind, text = instead
    frames = (seen_frame(one["file"], int(one["line"]), one["function"]) for one in _FRAME.finditer(text))
    message = text.rstrip().rpartition("\n")[2].partition(": ")[2]
    return ExceptionFacts(type=kind, message=message[:MOST_SAID], stack=tuple(frames))


def _under_way() -> list[tuple[int, int]]:
    if not hasattr(_forks, "stack"):
        _forks.stack = []
    return _forks.stack  # type: ignore[no-any-return]


def _depth() -> int:
    """How many frames the caller of ``os.fork`` has, itself included."""
    frame, depth = sys._getframe(2), 1
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _close_some() -> None:
    """Closes the files of children that have ended without a crash, of forks that failed, and the oldest traces."""
    over: list[int] = []
    traces: list[int] = []
    for file in _files[:-1]:
        pid, _ = _header(file)
        if pid and psutil.pid_exists(pid):
            continue
        is_trace = pid and os.fstat(file).st_size > _HEADER_BYTES
        (traces if is_trace else over).append(file)
    _close([*over, *traces[:-_MOST_TRACES]])


def _close(files: list[int]) -> None:
    for file in files:
        # First of all: a fork of another thread must not find a number that may be somebody else's by then.
        _files.remove(file)
        with suppress(OSError):
            os.close(file)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
