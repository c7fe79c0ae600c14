"""How a process that is no child of this one has ended, even if its parent has collected its status already.

The kernel gives it to whoever has had a pidfd of the process since before its end; it does so from Linux 6.15 on.
"""

import fcntl
import os
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# The request PIDFD_GET_INFO and what it fills in, struct pidfd_info, see <linux/pidfd.h>: a mask of what is wanted, or
# was given, comes first, the status last.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT = 1 << 3
# Each takes a file descriptor.
_MOST = 128


class ExitStatuses:
    """Holds a pidfd of each of some processes."""

    def __init__(self) -> None:
        # With the inode of each: a program may close all descriptors, and open others.
        self._files: dict[int, tuple[int, int]] = {}
        # The look of a peer may be left behind on its thread.
        self._lock = threading.Lock()
        self._is_closed = False

    def hold(self, pids: Iterable[int]) -> None:
        """Opens processes that are alive, so that their statuses can be read when they have ended."""
        with self._lock, suppress(AttributeError):  # where the system has no pidfds
            for pid in pids:
                if not self._is_closed and pid not in self._files and len(self._files) < _MOST:
                    with suppress(OSError):  # it has ended, or no descriptor is left
                        file = os.pidfd_open(pid)
                        self._files[pid] = file, os.fstat(file).st_ino

    def of(self, pid: int) -> int | None:
        """The exit code of a process whose parent has collected it, negative for a signal; None if it is unknown."""
        with self._lock:
            file, inode = self._files.get(pid, (-1, 0))
            return _exit_code(file) if _is_of(pid, file, inode) else None

    def close(self) -> None:
        """Closes what is held."""
        with self._lock:
            self._is_closed = True
            held, self._files = self._files, {}
        for pid, (file, inode) in held.items():
            if _is_of(pid, file, inode):
                with suppress(OSError):
                    os.close(file)


def _is_of(pid: int, file: int, inode: int) -> bool:
    """Whether a descriptor is still that of a process, which may have ended."""
    with suppress(OSError):
        # Older kernels give all pidfds one inode, and tell them apart here.
        lines = Path(f"/proc/self/fdinfo/{file}").read_text().splitlines()
        return os.fstat(file).st_ino == inode and not {f"Pid:\t{pid}", "Pid:\t-1"}.isdisjoint(lines)
    return False


def _exit_code(file: int) -> int | None:
    with suppress(OSError, ValueError):
        given = _INFO.unpack(fcntl.ioctl(file, _GET_INFO, _INFO.pack(_EXIT, *[0] * 13)))
        if given[0] & _EXIT:
            return os.waitstatus_to_exitcode(given[-1])
    return None
