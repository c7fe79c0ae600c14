"""Folders of local staging: made where nobody else can write, and claimed by the process that works in them.

A manifest in each says whose it is, and where what is in it belongs.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
"""The file that makes a folder one of local staging."""
KINDS = {"files": ("append", "rows", "whole"), "calls": ("call",)}
"""The kinds of staging, and of the frames in each."""
SCHEMA = 1
"""Number of the layout of a folder of staging."""
# A manifest has ten lines; what is larger is none.
_MOST_BYTES = 1 << 20
_LATEST_NS = 1 << 63
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Whose staging a folder is.

    Attributes:
        logger: Class name of the logger.
        kind: ``"files"`` for frames that belong into files below ``destination``, ``"calls"`` for calls of a logger.
        destination: The directory that the logger writes to, or a path or URL for people. Paths are made absolute.
        root: The logger's ``save_dir``, made absolute: runs with the same one are of the same project.
        identity: What tells this run from others of the same logger: its name and version.
        host: Host name.
        pid: The process that writes, or wrote, here.
        created_ns: When the folder was made, nanoseconds since the epoch.
    """

    logger: str
    kind: str
    destination: str
    root: str
    identity: str
    host: str = ""
    pid: int = 0
    created_ns: int = 0

    def __post_init__(self) -> None:
        # Loggers know paths relative to the working directory; whoever recovers has another.
        for name in ("destination", "root"):
            path = getattr(self, name)
            object.__setattr__(self, name, path if _is_absolute(path) or not path else os.path.abspath(path))


class StagingError(Exception):
    """A folder is no local staging, or not of a kind this version reads; its text says which."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Makes a folder one of local staging, at once.

    Raises:
        OSError: If it cannot be written to.
    """
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps({"schema": SCHEMA, **asdict(manifest)}))
    os.replace(temporary, folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Whose staging a folder is.

    Raises:
        StagingError: If it is none, of another version, or if somebody else may have written there.
    """
    try:
        _check_owner(folder)
        said = _manifest_text(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise StagingError(f"{folder} is not a staging folder of ncclsafe, or is damaged: {error}") from error
    schema = said.pop("schema", None) if isinstance(said, dict) else None
    if schema != SCHEMA:
        raise StagingError(f"{folder} has schema {schema!r:.50}; this version of ncclsafe reads schema {SCHEMA}.")
    expected = {field.name: int if field.name in ("pid", "created_ns") else str for field in fields(Manifest)}
    is_typed = {name: type(value) for name, value in said.items()} == expected
    if not is_typed or not _makes_sense(**said):
        raise StagingError(f"{folder / MANIFEST} is damaged: it contains {repr(said)[:200]}")
    return Manifest(**said)


def staging_folders(directory: Path) -> list[Path]:
    """Folders of local staging that are in a directory, the oldest of each logger first, also damaged ones.

    Raises:
        OSError: If the directory cannot be read.
    """
    return sorted(path for path in directory.iterdir() if is_staging(path))


def is_staging(folder: Path) -> bool:
    """Whether a folder is local staging: it has a manifest, which is not one of some other program."""
    if not os.path.isfile(folder / MANIFEST):
        return False
    try:
        said = _manifest_text(folder)
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(said, dict) and "schema" in said


def open_regular(path: str, flags: int) -> int:
    """An opener of regular files: anything else is an error at once, where to open a pipe would wait for ever.

    Raises:
        OSError: If it cannot be opened, or is no regular file.
    """
    handle = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "Not a regular file", path)


def _manifest_text(folder: Path) -> Any:
    with open(folder / MANIFEST, "rb", opener=open_regular) as file:
        return json.loads(file.read(_MOST_BYTES))


def _makes_sense(kind: str, destination: str, root: str, created_ns: int, **_: Any) -> bool:
    has_place = _is_absolute(destination) or (kind == "calls" and not destination)
    is_dated = 0 <= created_ns < _LATEST_NS
    return kind in KINDS and has_place and (_is_absolute(root) or not root) and is_dated


def _is_absolute(path: str) -> bool:
    return os.path.isabs(path) or "://" in path


def _check_owner(folder: Path) -> None:
    """What is read there is written to where its manifest says, with all rights of this user."""
    if stat.S_IMODE(folder.stat().st_mode) & 0o022:
        raise PermissionError(f"others can write to it; if what is in it is yours, run: chmod go-w {folder}")
    for path in (folder, *folder.iterdir()):
        # Another process may be at work there.
        with suppress(FileNotFoundError):
            found = path.lstat()
            if found.st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to user {found.st_uid}")
            if path != folder and not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise PermissionError(f"{path} is neither a file nor a directory")


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
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        raise PermissionError(f"{folder} is {what}; {instead}, for instance to its target")
    if found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to user {found.st_uid}; {instead}")
    default = default_staging_dir()
    if folder in (default, default.parent) and stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    elif stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(f"others can write to {folder}: run chmod go-w {folder}, or {instead}")
