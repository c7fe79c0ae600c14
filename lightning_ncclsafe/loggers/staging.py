"""Folders of local staging: made where nobody else can write, and claimed by the process that works in them."""

import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from lightning_ncclsafe.loggers.manifest import (
    MANIFEST,
    Manifest,
    StagingError,
    read_manifest,
    staging_folders,
    write_manifest,
)

_LOCK = "lock"
# Logger, time, process and number, see make_staging.
_UNFINISHED = re.compile(r".+-\d+-\d+-\d+")
_folders = count()
# What this process has claimed: a lock of lockf is none within a process, and closing any handle of the file ends it.
# A child that was forked has a pid of its own here, as it has locks of its own.
_claims: dict[tuple[int, str], object] = {}
# Directories that were made by this process.
_made: set[Path] = set()
# How often a directory is made that another process removes as soon as it is there: that one has just ended.
_ATTEMPTS = 20


class Claim:
    """The right to work in a folder of staging, until it is given up or the process ends.

    A lock of lockf: it is not inherited by child processes, as one of flock would be.

    Args:
        folder: The folder.

    Attributes:
        is_mine: Whether nobody else had it.
        is_new: Whether there was no lock in the folder before: nobody has ever worked there, or it was removed.

    Raises:
        OSError: If the folder is there and cannot be locked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = os.getpid(), os.path.realpath(folder)
        self._handle: int | None = None
        self.is_mine = False
        self.is_new = False
        if _claims.setdefault(self._key, self) is self:
            self._lock()

    def give_up(self) -> None:
        """Lets others have it."""
        # In this order: to close a handle ends the lock of whoever in this process has claimed the folder since.
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if _claims.get(self._key) is self:
            del _claims[self._key]

    def renew(self) -> None:
        """Makes the lock again if somebody has removed it: cleaners of temporary directories do.

        Raises:
            OSError: If that fails, or somebody else has taken the folder meanwhile.
        """
        if self._handle is None or self._key[0] != os.getpid() or _is_at(self._handle, self._folder / _LOCK):
            return
        handle, _ = _open_lock(self._folder / _LOCK)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        # It is of another file, so that to close it ends no lock of the new one.
        os.close(self._handle)
        self._handle = handle

    def remove_lock(self) -> None:
        """Removes the lock that this has made anew, and the folder if it was just being removed and is empty."""
        with suppress(OSError):
            (self._folder / _LOCK).unlink()
            self._folder.rmdir()

    def _lock(self) -> None:
        path = self._folder / _LOCK
        try:
            self._handle, self.is_new = _open_lock(path)
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Else whoever had it has removed it since, and another one may have been made.
            self.is_mine = _is_at(self._handle, path)
        except OSError as error:
            is_taken = self._handle is not None and error.errno in (errno.EACCES, errno.EAGAIN)
            if not is_taken and self._folder.exists():
                raise
        finally:
            if not self.is_mine:
                self.give_up()


def default_staging_dir() -> Path:
    """``ncclsafe-<user id>/logs`` in the directory for temporary files."""
    return Path(tempfile.gettempdir()) / f"ncclsafe-{os.getuid()}" / "logs"


def make_staging(staging_dir: Path, manifest: Manifest) -> tuple[Path, Claim]:
    """Makes a folder of local staging and claims it for this process.

    Args:
        staging_dir: Where; made, for this user only.
        manifest: Whose it is; host, process and time are filled in.

    Returns:
        The folder, and the claim to it.

    Raises:
        OSError: If it cannot be made, or somebody else could change what is in it.
    """
    here = replace(manifest, host=socket.gethostname(), pid=os.getpid(), created_ns=time.time_ns())
    folder = staging_dir / f"{manifest.logger}-{here.created_ns}-{here.pid}-{next(_folders)}"
    _make_private(staging_dir, folder)
    claim = None
    try:
        # Before it has a manifest, so that no recovery takes it for one that was left behind.
        claim = Claim(folder)
        if not claim.is_mine:
            raise OSError(f"{folder} is claimed by another process")
        write_manifest(folder, here)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if claim is not None:
            claim.give_up()
        raise
    return folder, claim


def keep_staging(folder: Path, claim: Claim | None, manifest: bytes) -> None:
    """Makes a folder of local staging again if it was removed, or a part of it, and lets it look used.

    Cleaners of temporary directories remove what was not changed for days; a run may take weeks.

    Args:
        folder: The folder; made, for this user only.
        claim: The claim to it, if there is one.
        manifest: The text of its manifest; none if it had none.

    Raises:
        OSError: If it cannot be made, somebody else could change what is in it, or has taken it.
    """
    _make_private(folder.parent, folder)
    if claim is not None:
        # Before the manifest, so that no recovery takes the folder for one that was left behind.
        claim.renew()
    if manifest and not (folder / MANIFEST).exists():
        temporary = folder / f"{MANIFEST}.tmp"
        temporary.write_bytes(manifest)
        os.replace(temporary, folder / MANIFEST)
    for name in (_LOCK, MANIFEST):
        with suppress(FileNotFoundError):
            os.utime(folder / name)


def remove_staging(folder: Path) -> None:
    """Removes a folder of local staging, and the directory that it is in if that is ours and empty now."""
    shutil.rmtree(folder, ignore_errors=True)
    _made.discard(folder)
    with suppress(OSError):
        for directory in _ours(folder.parent):
            directory.rmdir()
            _made.discard(directory)


def is_alive(manifest: Manifest) -> bool:
    """Whether the process that has made a folder is another one of this host, and lives."""
    if manifest.host != socket.gethostname() or manifest.pid in (0, os.getpid()):
        return False
    # Imported for the rare case: the command line answers at once without it.
    import psutil

    try:
        process = psutil.Process(manifest.pid)
        # One that has got its number since is younger than the folder.
        is_it = process.create_time() * 1e9 < manifest.created_ns
        return is_it and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False


def remove_unfinished(staging_dir: Path) -> None:
    """Removes folders of processes that have died before they had anything in them, not even a manifest."""
    # Imported for the rare case, as above.
    import psutil

    with suppress(OSError):
        for folder in [path for path in staging_dir.iterdir() if _UNFINISHED.fullmatch(path.name) and path.is_dir()]:
            pid = int(folder.name.rsplit("-", 2)[1])
            if psutil.pid_exists(pid) or not {path.name for path in folder.iterdir()} <= {_LOCK, f"{MANIFEST}.tmp"}:
                continue
            claim = Claim(folder)
            if claim.is_mine:
                shutil.rmtree(folder, ignore_errors=True)
                claim.give_up()


def leftovers(staging_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Folders of local staging that are in a directory, and are not this process's own."""
    with suppress(OSError):
        for folder in staging_folders(staging_dir):
            if (os.getpid(), os.path.realpath(folder)) not in _claims:
                with suppress(StagingError):
                    yield folder, read_manifest(folder)


def _open_lock(path: Path) -> tuple[int, bool]:
    """A handle of the lock, and whether it was made."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        return os.open(path, flags), False
    return os.open(path, flags | os.O_CREAT, 0o600), True


def _is_at(handle: int, path: Path) -> bool:
    """Whether this is the file that is there."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.lstat())
    return False


def _ours(staging_dir: Path) -> list[Path]:
    """The directories above a folder of staging that are nobody else's, from the inner one on."""
    if staging_dir == default_staging_dir():
        return [staging_dir, staging_dir.parent]
    return [staging_dir] if staging_dir in _made else []


def _make_private(*folders: Path) -> None:
    """Makes directories, each within the one before, and sees to it that nobody else can change what is in them.

    Raises:
        PermissionError: If somebody else can.
    """
    if folders[0] == default_staging_dir():
        # The directory above is ours, too; anybody may make one of its name first.
        folders = (folders[0].parent, *folders)
    for attempt in range(_ATTEMPTS):
        try:
            for place, folder in enumerate(folders):
                # Those in between must not be made by others' rules.
                _make_one_private(folder, with_parents=not place)
            return
        except FileNotFoundError:
            # Another process has just removed the last folder that was in it, and then it.
            if attempt == _ATTEMPTS - 1:
                raise


def _make_one_private(folder: Path, *, with_parents: bool) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=with_parents)
        _made.add(folder)
    found = folder.lstat()
    instead = "set LoggerOffload(staging_dir=...)"
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no directory"
        raise PermissionError(f"{folder} is {what}; {instead}, to where it leads for instance")
    if found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to user {found.st_uid}; {instead}")
    default = default_staging_dir()
    if folder in (default, default.parent) and stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    elif stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(f"others may write to {folder}: chmod go-w {folder}, or {instead}")
