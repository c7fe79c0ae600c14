"""Folders of local staging: created where nobody else can write, each claimed by the process that works in it.

The manifest of each names its owner and where its content belongs.
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
        self._key = _claim_key(folder)
        self._handle: int | None = None
        self.is_mine = False
        self.is_new = False
        if _claims.setdefault(self._key, self) is self:
            self._lock()

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

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
        if self._handle is None or self._key[0] != os.getpid() or _is_lock_at(self._handle, self._folder / LOCK):
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
            self.is_mine = _is_lock_at(self._handle, path)
        except OSError as error:
            is_taken = self._handle is not None and error.errno in (errno.EACCES, errno.EAGAIN)
            if not is_taken and self._folder.exists():
                raise
        finally:
            if not self.is_mine:
                self.give_up()


def _claim_key(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)


def _open_lock(path: Path) -> tuple[int, bool]:
    """A handle of the lock, and whether it was created."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        return os.open(path, flags), False
    return os.open(path, flags | os.O_CREAT, 0o600), True


def _is_lock_at(handle: int, path: Path) -> bool:
    """Whether a handle is of the file at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.lstat())
    return False


MANIFEST = "manifest.json"
"""The file that makes a folder one of local staging."""
KINDS = {"files": ("append", "rows", "whole"), "calls": ("call",)}
"""The kinds of staging, with the kinds of frames in each."""
SCHEMA = 1
"""Number of the layout of a folder of staging."""
# A manifest has ten lines; anything larger is not one.
_MOST_BYTES = 1 << 20
_LATEST_NS = 1 << 63
# Logger, time, process and number; see make_staging.
_UNFINISHED = re.compile(r".+-\d+-\d+-\d+")
_folders = count()
# Directories that this process created.
_made: set[Path] = set()
# How often to create a directory that another process, which is just ending, removes at once.
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Owner and destination of a folder of staging.

    Attributes:
        logger: Class name of the logger.
        kind: ``"files"`` for frames of files below ``destination``, ``"calls"`` for calls of a logger.
        destination: The directory that the logger writes to, or a path or URL to display. Paths become absolute.
        root: The logger's absolute ``save_dir``: runs that share it belong to the same project.
        identity: Name and version of this run of the logger.
        host: Host name.
        pid: The process that writes, or wrote, here.
        created_ns: When the folder was created, nanoseconds since the epoch.
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
        # Loggers have paths relative to the working directory, which is another one in a recovery.
        for name in ("destination", "root"):
            path = getattr(self, name)
            object.__setattr__(self, name, path if _is_absolute(path) or not path else os.path.abspath(path))


class StagingError(Exception):
    """A folder is not local staging, or of a kind that this version does not read; the message names which."""


def write_small(path: Path, data: bytes) -> None:
    """Writes a small file, atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def read_small(path: Path) -> bytes:
    """The content of a small file; empty if there is none."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read()
    except OSError:
        return b""


def read_manifest(folder: Path) -> Manifest:
    """Owner and destination of a folder of staging.

    Raises:
        StagingError: If it is not staging, of another version, or if somebody else may have written there.
    """
    try:
        _check_owner(folder)
        found = _manifest_text(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise StagingError(f"{folder} is not a staging folder of ncclsafe, or is damaged: {error}") from error
    schema = found.pop("schema", None) if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise StagingError(f"{folder} has schema {schema!r:.50}; this version of ncclsafe reads schema {SCHEMA}.")
    expected = {field.name: int if field.name in ("pid", "created_ns") else str for field in fields(Manifest)}
    is_typed = {name: type(value) for name, value in found.items()} == expected
    if not is_typed or not _makes_sense(**found):
        raise StagingError(f"{folder / MANIFEST} is damaged: it contains {repr(found)[:200]}")
    return Manifest(**found)


def staging_folders(directory: Path) -> list[Path]:
    """Folders of local staging in a directory, including damaged ones, the oldest of each logger first."""
    return sorted(path for path in directory.iterdir() if is_staging(path))


def is_staging(folder: Path) -> bool:
    """Whether a folder is local staging: it has a manifest that is not another program's."""
    if not os.path.isfile(folder / MANIFEST):
        return False
    try:
        found = _manifest_text(folder)
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(found, dict) and "schema" in found


def open_regular(path: str, flags: int) -> int:
    """An opener of regular files: anything else is an error at once, where opening a pipe would wait forever."""
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
    """What is read there is written wherever its manifest names, with all permissions of this user."""
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


def default_staging_dir() -> Path:
    """``ncclsafe-<user id>/logs`` in the directory for temporary files."""
    return Path(tempfile.gettempdir()) / f"ncclsafe-{os.getuid()}" / "logs"


def make_staging(staging_dir: Path, manifest: Manifest) -> tuple[Path, Claim]:
    """Creates a folder of local staging and claims it for this process; returns both.

    Args:
        staging_dir: Where; created, for this user only.
        manifest: Its manifest; host, process and time are filled in.

    Raises:
        OSError: If it cannot be created, or others could change what is in it.
    """
    here = replace(manifest, host=socket.gethostname(), pid=os.getpid(), created_ns=time.time_ns())
    folder = staging_dir / f"{manifest.logger}-{here.created_ns}-{here.pid}-{next(_folders)}"
    _make_private(folder)
    claim = None
    try:
        # Before it has a manifest, so that no recovery takes it for one left behind.
        claim = Claim(folder)
        if not claim.is_mine:
            raise OSError(f"{folder} is claimed by another process")
        write_small(folder / MANIFEST, json.dumps({"schema": SCHEMA, **asdict(here)}).encode())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if claim is not None:
            claim.give_up()
        raise
    return folder, claim


def keep_staging(folder: Path, claim: Claim | None, manifest: bytes) -> None:
    """Creates a folder of local staging again if it, or a part of it, was removed, and renews its times.

    Cleaners of temporary directories remove what has not changed for days; a run may take weeks.

    Args:
        folder: The folder; created, for this user only.
        manifest: The text of its manifest; empty if it had none.

    Raises:
        OSError: If it cannot be created, others could change what is in it, or another process has claimed it.
    """
    _make_private(folder)
    if claim is not None:
        # Before the manifest, so that no recovery takes the folder for one left behind.
        claim.renew()
    if manifest and not (folder / MANIFEST).exists():
        write_small(folder / MANIFEST, manifest)
    for name in (LOCK, MANIFEST):
        with suppress(FileNotFoundError):
            os.utime(folder / name)


def remove_staging(folder: Path) -> None:
    """Removes a folder of local staging, and its directory if that is ours and empty now."""
    shutil.rmtree(folder, ignore_errors=True)
    _made.discard(folder)
    with suppress(OSError):
        above = folder.parent
        # Those that are ours alone, from the inner one on.
        ours = [above, above.parent] if above == default_staging_dir() else [above] if above in _made else []
        for directory in ours:
            directory.rmdir()
            _made.discard(directory)


def is_alive(manifest: Manifest) -> bool:
    """Whether the process that created a folder is another one of this host and alive."""
    if manifest.host != socket.gethostname() or manifest.pid in (0, os.getpid()):
        return False
    # Imported only when needed: the command line starts faster without it.
    import psutil

    try:
        process = psutil.Process(manifest.pid)
        # A later process with the same pid is younger than the folder.
        is_it = process.create_time() * 1e9 < manifest.created_ns
        return is_it and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False


def remove_unfinished(staging_dir: Path) -> None:
    """Removes folders of processes that died before writing anything, not even a manifest."""
    # Imported only when needed, as above.
    import psutil

    with suppress(OSError):
        for folder in [path for path in staging_dir.iterdir() if _UNFINISHED.fullmatch(path.name) and path.is_dir()]:
            pid = int(folder.name.rsplit("-", 2)[1])
            if psutil.pid_exists(pid) or not {path.name for path in folder.iterdir()} <= {LOCK, f"{MANIFEST}.tmp"}:
                continue
            with Claim(folder) as claim:
                if claim.is_mine:
                    shutil.rmtree(folder, ignore_errors=True)


def leftovers(staging_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Folders of local staging in a directory that are not this process's own."""
    with suppress(OSError):
        for folder in staging_folders(staging_dir):
            if _claim_key(folder) not in _claims:
                with suppress(StagingError):
                    yield folder, read_manifest(folder)


def _make_private(folder: Path) -> None:
    """Creates a folder, and the one it is in, and ensures that nobody else can change what is in them.

    Raises:
        PermissionError: If others can.
    """
    folders = [folder.parent, folder]
    if folder.parent == default_staging_dir():
        # The directory above is ours, too; anybody could create one of that name first.
        folders.insert(0, folder.parent.parent)
    for attempt in range(_ATTEMPTS):
        try:
            for place, one in enumerate(folders):
                # Intermediate directories must not get default permissions.
                _make_one_private(one, with_parents=not place)
            return
        except FileNotFoundError:
            # Another process has just removed the last folder in it, and then the directory.
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
