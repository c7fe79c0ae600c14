"""Children of this process that were killed or have failed, detected without reaping them."""

import math
import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from multiprocessing import process as _multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil

from lightning_ncclsafe.facts import EndedProcess
from lightning_ncclsafe.probes.host.resources import how_ended, signal_name
from lightning_ncclsafe.probes.process import child_crashes

_PROC = Path("/proc")
_KILLED = (os.CLD_KILLED, os.CLD_DUMPED) if hasattr(os, "CLD_KILLED") else ()
# How often to look for new children, and how many to watch: each takes a file descriptor.
_EVERY_S = 1.0
_MOST = 128
_KEPT = 16
# Signals that a pool sends to its own processes.
_OWN_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
# Reaped children count if they ended this long before the stall, or later.
_RECENT_S = 60.0
# Of a process that its parent has collected and forgotten; no exit code is so high.
_CLOSED = 1 << 16
# Not active_children(), which would reap those that have ended.
_children_of_multiprocessing: Any = getattr(_multiprocessing, "_children", ())


class ChildWatch:
    """Records how children end, even if their parent reaps them at once, as a process pool does.

    A thread, started with the first child, sleeps until one of them ends. If the kernel has no pidfds (before Linux
    5.3), nothing is recorded, and :meth:`read` gives only unreaped children.
    """

    def __init__(self) -> None:
        self._next_s = -math.inf
        self._fds: dict[int, int] = {}
        self._known: set[int] = set()
        self._processes: dict[int, BaseProcess] = {}
        self._taken: deque[tuple[float, int, BaseProcess]] = deque(maxlen=_KEPT)
        self._poll: select.epoll | None = None
        self._wake = -1, -1
        self._thread: threading.Thread | None = None
        self._ended: deque[tuple[float, EndedProcess]] = deque(maxlen=_KEPT)
        self._done: deque[int] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._is_closed = False
        _watches.add(self)
        child_crashes.listen()

    def note(self) -> None:
        """Looks for new children, at most once a second; takes some 10 µs for each thread of this process."""
        # A thread that forks does not wait for one that looks: that one has a next turn.
        if self._is_closed or time.monotonic() < self._next_s or not self._looking.acquire(blocking=False):
            return
        try:
            self._next_s = time.monotonic() + _EVERY_S
            self._look()
        finally:
            self._looking.release()

    def forked(self) -> None:
        """Looks at once: a pool replaces a child that ends early before the next second has come."""
        self._next_s = -math.inf
        self.note()
        # multiprocessing knows its new child only after the fork.
        self._next_s = -math.inf

    def read(self, idle_s: float) -> tuple[EndedProcess, ...]:
        """Unreaped children, and those that ended during this rank's stall, or shortly before."""
        self._learn()
        now_s, seen = time.monotonic(), {child.pid: (at_s, child) for at_s, child in [*self._ended]}
        waiting = ended_children()
        found = [_aged(child, now_s - seen[child.pid][0]) if child.pid in seen else child for child in waiting]
        for pid in seen.keys() - {child.pid for child in waiting}:
            at_s, child = seen[pid]
            if now_s - at_s <= idle_s + _RECENT_S and child.signal not in _OWN_SIGNALS:
                found.append(replace(_aged(child, now_s - at_s), is_replaced=True))
        return tuple(map(_with_place, found))

    def done(self) -> tuple[int, ...]:
        """Process ids of the last children that are known to have exited with status 0."""
        self._learn()
        return tuple(self._done)

    def close(self) -> None:
        """Ends the thread, and closes its files."""
        if not self._is_closed:
            self._is_closed = True
            child_crashes.leave()
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(OSError):
                os.write(self._wake[1], b"x")
            thread.join(1.0)

    def _look(self) -> None:
        with suppress(OSError, AttributeError):
            children = {*_children(_PROC)}
            for pid in children - self._known:
                if len(self._fds) < _MOST:
                    self._watch(pid)
            self._known &= children
            watched = {*self._fds.values()}
            known = self._processes | {one.pid: one for one in [*_children_of_multiprocessing] if one.pid}
            self._processes = {pid: one for pid, one in known.items() if pid in watched}
            self._learn()

    def _watch(self, pid: int) -> None:
        fd = os.pidfd_open(pid)
        if self._poll is None:
            self._poll, self._wake = select.epoll(), os.pipe()
            self._poll.register(self._wake[0], select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="ncclsafe-children", daemon=True)
            self._thread.start()
        self._fds[fd] = pid
        self._known.add(pid)
        self._poll.register(fd, select.EPOLLIN)

    def _learn(self) -> None:
        """Takes exit codes from multiprocessing; a kept process object would keep its pipes open."""
        with self._lock:
            taken = [self._taken.popleft() for _ in range(len(self._taken))]
            for at_s, pid, process in taken:
                # A child that is not reaped yet is not reaped here.
                if psutil.pid_exists(pid) or (code := _exit_code(process)) is None:
                    self._taken.append((at_s, pid, process))
                elif code != _CLOSED:
                    ended_by, exit_code = how_ended(code)
                    self._note((at_s, EndedProcess(pid=pid, signal=ended_by, exit_code=exit_code)))

    def _note(self, ended: tuple[float, EndedProcess]) -> None:
        if _has_failed(ended[1]):
            self._ended.append(ended)
        else:
            self._done.append(ended[1].pid)

    def _run(self) -> None:
        poll = self._poll
        assert poll is not None
        with suppress(OSError, ValueError):
            while True:
                ended = [fd for fd, _ in poll.poll()]
                if self._wake[0] in ended:
                    break
                for fd in ended:
                    self._take(poll, fd)
        for fd in (*self._fds, *self._wake):
            os.close(fd)
        poll.close()

    def _take(self, poll: "select.epoll", fd: int) -> None:
        # Before the close, as another file may get the number.
        pid = self._fds.pop(fd)
        # One that has ended at once was not known to multiprocessing when it was found.
        unknown = (one for one in [*_children_of_multiprocessing] if one.pid == pid)
        process = self._processes.pop(pid, None) or next(unknown, None)
        if (child := _ended(fd, os.P_PIDFD)) is not None:
            self._note((time.monotonic(), child))
        elif process is not None:
            # Its parent has already reaped it, and knows the exit code.
            self._taken.append((time.monotonic(), pid, process))
        # Explicitly: a child that was forked meanwhile also has the descriptor, and keeps it in the poll.
        poll.unregister(fd)
        os.close(fd)


_watches: WeakSet[ChildWatch] = WeakSet()


def _look_after_fork() -> None:
    for watch in [*_watches]:
        watch.forked()


# Not those that are started without os.fork(), as subprocess does; these are found within a second. A fork has none of
# the threads that look, and would register its own children where its parent's thread waits.
os.register_at_fork(after_in_parent=_look_after_fork, after_in_child=_watches.clear)


def _exit_code(process: BaseProcess) -> int | None:
    """None if its parent does not know yet; ``_CLOSED`` if the process object is closed, and so was reaped."""
    with suppress(ValueError):
        return process.exitcode
    return _CLOSED


def _has_failed(child: EndedProcess) -> bool:
    return bool(child.signal or child.exit_code)


def _aged(child: EndedProcess, ago_s: float) -> EndedProcess:
    return replace(child, ago_s=round(ago_s, 1))


def ended_children(proc: Path = _PROC) -> tuple[EndedProcess, ...]:
    """Unreaped children that were killed, or have exited with a code other than 0.

    They are not reaped, so that their parent code, for instance torch's loader, still learns how they ended. Takes some
    10 µs for each child; empty if the kernel does not list a process's children.
    """
    return tuple(child for pid in _children(proc) if (child := _ended(pid)) and _has_failed(child))


def _children(proc: Path) -> list[int]:
    found: list[int] = []
    for folder in sorted((proc / "self" / "task").glob("*")):
        with suppress(OSError):
            found += map(int, (folder / "children").read_text().split())
    return found


def _ended(number: int, kind: int | None = None) -> EndedProcess | None:
    """By process id, or by a file descriptor of one (``os.P_PIDFD``)."""
    with suppress(OSError):
        status = os.waitid(os.P_PID if kind is None else kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None and status.si_code in _KILLED:
            return EndedProcess(pid=status.si_pid, signal=signal_name(status.si_status))
        if status is not None:
            return EndedProcess(pid=status.si_pid, exit_code=status.si_status)
    return None


def _with_place(child: EndedProcess) -> EndedProcess:
    """The same, with where it was when a signal or an exception ended it."""
    if child.signal:
        return replace(child, stack=child_crashes.crash_of(child.pid, child.signal))
    raised = child_crashes.raised_in(child.pid)
    if raised is None:
        return child
    return replace(
        child, stack=raised.stack, raised=f"{raised.type}: {raised.message}".rstrip(": ")[: child_crashes.MOST_SAID]
    )
