"""Folders of local staging: made where nobody else can write, and claimed by the process that works in them."""

import errno
import fcntl
import os
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

from lightning_ncclsafe.loggers.manifest import Manifest, StagingError, read_manifest, staging_folders, write_manifest

_LOCK = "lock"
_folders = count()
# What this process has claimed: a lock of lockf is none within a process, and closing any handle of the file ends it.
# A child that was forked has a pid of its own here, as it has locks of its own.
_claims: dict[tuple[int, str], object] = {}


class Claim:
    """The right to work in a folder of staging, until it is given up or the process ends.

    A lock of lockf: it is not inherited by child processes, as one of flock would be.

    Args:
        folder: The folder.

    Attributes:
        is_mine: Whether nobody else had it.

    Raises:
        OSError: If the folder is there and cannot be locked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = os.getpid(), os.path.realpath(folder)
        self._handle: int | None = None
        self.is_mine = False
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

    def remove_lock(self) -> None:
        """Removes a folder that was just being removed, and has nothing in it but the lock that this has made anew."""
        with suppress(OSError):
            (self._folder / _LOCK).unlink()
            self._folder.rmdir()

    def _lock(self) -> None:
        try:
            self._handle = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_taken = self._handle is not None and error.errno in (errno.EACCES, errno.EAGAIN)
            self.give_up()
            if not is_taken and self._folder.exists():
                raise
        else:
            self.is_mine = True


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
    _make_private(staging_dir)
    here = replace(manifest, host=socket.gethostname(), pid=os.getpid(), created_ns=time.time_ns())
    folder = staging_dir / f"{manifest.logger}-{here.created_ns}-{here.pid}-{next(_folders)}"
    folder.mkdir(mode=0o700)
    claim = None
    try:
        # Before it has a manifest, so that no recovery takes it for one that was left behind.
        claim = Claim(folder)
        if not claim.is_mine:
            raise OSError(f"{folder} is claimed by another process")
        write_manifest(folder, here)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if claim is not None:
            claim.give_up()
        raise
    return folder, claim


def leftovers(staging_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Folders of local staging that are in a directory, and are not this process's own."""
    with suppress(OSError):
        for folder in staging_folders(staging_dir):
            if (os.getpid(), os.path.realpath(folder)) not in _claims:
                with suppress(StagingError):
                    yield folder, read_manifest(folder)


def _make_private(staging_dir: Path) -> None:
    """Makes the directory, and sees to it that nobody else can change what is in it.

    Raises:
        PermissionError: If somebody else can.
    """
    is_default = staging_dir == default_staging_dir()
    # Of the default one, the directory above is ours, too; anybody may make one of its name first.
    for folder in (staging_dir.parent, staging_dir) if is_default else (staging_dir,):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        found = folder.lstat()
        instead = "set LoggerOffload(staging_dir=...)"
        if not stat.S_ISDIR(found.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no directory"
            raise PermissionError(f"{folder} is {what}; {instead}, to where it leads for instance")
        if found.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to user {found.st_uid}; {instead}")
        if is_default and stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
        elif stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError(f"others may write to {folder}: chmod go-w {folder}, or {instead}")
