"""The right to work in a folder: a lock that ends with the process, however that ends."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

LOCK = "lock"
"""The file that is locked."""

# Claims of this process: lockf does not lock within a process, and closing any handle of the file ends the lock. A
# forked child has its own pid here, as it has its own locks.
_claims: dict[tuple[int, str], object] = {}


class Claim:
    """The right to work in a folder of staging, until it is given up or the process ends.

    It is a lock of lockf, which child processes do not inherit, as they would one of flock.

    Attributes:
        is_mine: Whether this process has it.
        is_new: Whether the folder had no lock before: no process has worked there yet, or the lock was removed.

    Raises:
        OSError: If the folder exists and cannot be locked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = _key(folder)
        self._handle: int | None = None
        self.is_mine = False
        self.is_new = False
        if _claims.setdefault(self._key, self) is self:
            self._lock()

    def give_up(self) -> None:
        """Lets others have it."""
        # In this order: closing a handle would end the lock of a later claim of this process.
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if _claims.get(self._key) is self:
            del _claims[self._key]

    def renew(self) -> None:
        """Creates the lock again if it was removed, as cleaners of temporary directories do.

        Raises:
            OSError: If that fails, or another process has claimed the folder meanwhile.
        """
        if self._handle is None or self._key[0] != os.getpid() or _is_at(self._handle, self._folder / LOCK):
            return
        handle, _ = _open_lock(self._folder / LOCK)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        # It belongs to another file, so closing it does not end the new lock.
        os.close(self._handle)
        self._handle = handle

    def remove_lock(self) -> None:
        """Removes the lock that this claim created, and the folder if it was just being removed and is empty."""
        with suppress(OSError):
            (self._folder / LOCK).unlink()
            self._folder.rmdir()

    def _lock(self) -> None:
        path = self._folder / LOCK
        try:
            self._handle, self.is_new = _open_lock(path)
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Otherwise its owner has removed it since, and there may be another one.
            self.is_mine = _is_at(self._handle, path)
        except OSError as error:
            is_taken = self._handle is not None and error.errno in (errno.EACCES, errno.EAGAIN)
            if not is_taken and self._folder.exists():
                raise
        finally:
            if not self.is_mine:
                self.give_up()


def is_claimed_here(folder: Path) -> bool:
    """Whether a claim of this process has the folder."""
    return _key(folder) in _claims


def _key(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)


def _open_lock(path: Path) -> tuple[int, bool]:
    """A handle of the lock, and whether it was created."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        return os.open(path, flags), False
    return os.open(path, flags | os.O_CREAT, 0o600), True


def _is_at(handle: int, path: Path) -> bool:
    """Whether a handle is of the file at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.lstat())
    return False
