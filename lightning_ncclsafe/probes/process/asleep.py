"""Whether a process can no longer go on by itself: all of its threads wait for one another, and none runs meanwhile.

A thread that waits for a lock, a condition, a queue or another thread of its process sleeps in the kernel's futex; one
that waits for a socket, a pipe, storage, a child process or a time sleeps elsewhere, or runs again from time to time.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import HOUSEKEEPING
from lightning_ncclsafe.code.side_thread import own_threads
from lightning_ncclsafe.probes.absent import file_text, or_none
from lightning_ncclsafe.probes.process.main_thread import times_woken, wait_channel
from lightning_ncclsafe.probes.process.stacks import place_in
from lightning_ncclsafe.probes.process.thread_frames import current_frames

_PROC = Path("/proc")
_MOST_PROCESSES = 256
# Threads of torch, gloo, CUDA and NCCL, which serve collectives and devices, and nothing else that a thread waits for.
_SERVING = ("pt_tcpstore", "pt_gloo", "pt_nccl", "gloo_", "cuda", "NCCL")

_Woken = dict[int, int]
"""How often each thread has been woken up so far, by the kernel's number of the thread."""


class _Sleep(NamedTuple):
    began_s: float
    woken: _Woken


class SleepWatch:
    """Compares looks at processes, which are taken when ranks are asked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asleep: dict[int, _Sleep] = {}

    def asleep_s(self, pid: int) -> float | None:
        """For how many seconds all threads of a process have been asleep, waiting for one another; takes some 2 ms.

        0 at the first look that finds them so; None if one runs, has run since, or may wait for something else.
        """
        woken, before = self._look(pid), self._asleep.pop(pid, None)
        if woken is None:
            return None
        now_s = self._clock()
        began_s = before.began_s if before is not None and before.woken == woken else now_s
        self._asleep[pid] = _Sleep(began_s, woken)
        if len(self._asleep) > _MOST_PROCESSES:
            # That which was not looked at for longest; it may be gone.
            del self._asleep[next(iter(self._asleep))]
        return round(now_s - began_s, 1)

    def note_disturbed(self, pid: int) -> None:
        """Called after a thread of the process has been made to run, for instance by a signal."""
        before = self._asleep.pop(pid, None)
        if before is not None and (woken := self._look(pid)) is not None:
            self._asleep[pid] = before._replace(woken=woken)

    def _look(self, pid: int) -> _Woken | None:
        folder = _PROC / str(pid) / "task"
        besides = {*own_threads(), *_housekeeping()} if pid == os.getpid() else set[int]()
        woken: _Woken = {}
        # The main thread first: mostly, it is the one that runs.
        for thread in sorted(map(int, or_none(lambda: os.listdir(folder)) or [])):
            if thread in besides or _serves(folder / str(thread)):
                continue
            count = _woken_asleep(folder / str(thread))
            if count is None:
                return None
            woken[thread] = count
        return woken or None


def _woken_asleep(folder: Path) -> int | None:
    """How often a thread has been woken up; None unless it sleeps in the kernel's futex."""
    return times_woken(folder) if "futex" in wait_channel(folder) else None


def _serves(folder: Path) -> bool:
    return file_text(folder / "comm").startswith(_SERVING)


def _housekeeping() -> Iterator[int]:
    """The kernel's numbers of threads of this process for which no other waits, such as a progress bar's."""
    stacks = current_frames()
    for thread in threading.enumerate():
        frame = stacks.get(thread.ident or 0)
        while frame is not None:
            file, _, function = place_in(frame, frame.f_lineno)
            if thread.native_id and HOUSEKEEPING.has(file, function):
                yield thread.native_id
                break
            frame = frame.f_back
