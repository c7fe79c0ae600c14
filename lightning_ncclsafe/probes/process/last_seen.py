"""Where a rank was when it last wrote that down, for peers that find its process gone.

A process that was killed can report nothing any more. So each rank keeps its place in a small file in memory, and a
peer of its host that opened the file earlier, through ``/proc/PID/fd``, can still read it afterwards.
"""

import os
import threading
from contextlib import suppress
from itertools import takewhile

from lightning_ncclsafe.code.libraries import TRAINER_RUN
from lightning_ncclsafe.facts import Frame, LastSeen, Progress, codec
from lightning_ncclsafe.probes.process.open_files import files_in_memory, name_in_memory
from lightning_ncclsafe.probes.process.stacks import is_user_code, main_thread_frames, place_in, seen_frame

_MOST_BYTES = 1 << 16
# Longer stacks are those of a recursion.
_MOST_FRAMES = 100


class LastSeenFile:
    """Keeps the place of this process; nothing is kept where the system has no files in memory."""

    def __init__(self) -> None:
        self._fd = -1
        # The watchdog may still write while the training thread closes it.
        self._lock = threading.Lock()
        self._idle_s = 0.0
        self._stayed: tuple[Frame, ...] | None = None
        with suppress(OSError, AttributeError):
            self._fd = os.memfd_create(_name(os.getpid()))

    def note(self, progress: Progress) -> None:
        """Writes where the thread that trains is now; its stack only if it has made no progress since the last note."""
        if self._fd < 0:
            return
        has_moved, self._idle_s = progress.idle_s <= self._idle_s, progress.idle_s
        stack = () if has_moved else _user_frames()
        before = stack if has_moved or self._stayed is None else self._stayed
        alike = takewhile(lambda pair: _function(pair[0]) == _function(pair[1]), zip(stack, before, strict=False))
        self._stayed = None if has_moved else tuple(frame for frame, _ in alike)
        seen = LastSeen(stack=stack, stayed=len(self._stayed or ()), progress=progress)
        text = codec.encode(seen) + b"\n"
        with self._lock, suppress(OSError):  # no memory is left
            if self._is_open():
                os.pwrite(self._fd, text, 0)

    def close(self) -> None:
        """Closes the file; a process that has it open finds nothing in it any more."""
        with self._lock, suppress(OSError):
            if self._is_open():
                os.ftruncate(self._fd, 0)
                os.close(self._fd)
            self._fd = -1

    def _is_open(self) -> bool:
        """Whether the descriptor is still this file's: a program may close all, and open others."""
        return self._fd >= 0 and _is_of(os.getpid(), self._fd)


def open_last_seen(pid: int) -> int | None:
    """Opens the file of another process of this user on this host; None if it has none."""
    for link, name in files_in_memory(pid):
        if name == _name(pid):
            with suppress(OSError):  # closed meanwhile
                # The number may have become that of a pipe.
                file = os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                if _is_of(pid, file):
                    return file
                os.close(file)
    return None


def read_last_seen(file: int) -> LastSeen | None:
    """What is in an open file; None if that is nothing, or was being written as the process ended."""
    with suppress(OSError, codec.DecodeError):
        text, end, _ = os.pread(file, _MOST_BYTES, 0).partition(b"\n")
        return codec.decode(LastSeen, text) if end else None
    return None


def _is_of(pid: int, fd: int) -> bool:
    """Whether a descriptor of this process is that of the file of a process."""
    return name_in_memory(os.readlink(f"/proc/self/fd/{fd}")) == _name(pid)


def _name(pid: int) -> str:
    return f"ncclsafe-last-seen-{pid}"


def _user_frames() -> tuple[Frame, ...]:
    """The user's frames below the Trainer, outermost first; without their source, as reading that may take long."""
    found: list[Frame] = []
    for depth, frame in enumerate(main_thread_frames()):
        code = frame.f_code
        if depth == _MOST_FRAMES or TRAINER_RUN.has(code.co_filename, code.co_name):
            break
        if is_user_code(code.co_filename):
            found.append(seen_frame(*place_in(frame, frame.f_lineno)))
    return tuple(reversed(found))


def _function(frame: Frame) -> tuple[str, str]:
    return frame.file, frame.function
