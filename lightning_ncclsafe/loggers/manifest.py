"""The manifest of a folder of local staging: whose it is, and where what is in it belongs."""

import errno
import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
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
        raise StagingError(f"{folder} is no local staging of ncclsafe, or damaged: {error}") from error
    schema = said.pop("schema", None) if isinstance(said, dict) else None
    if schema != SCHEMA:
        raise StagingError(f"{folder} has schema {schema!r:.50}; this version of ncclsafe reads schema {SCHEMA}.")
    expected = {field.name: int if field.name in ("pid", "created_ns") else str for field in fields(Manifest)}
    is_typed = {name: type(value) for name, value in said.items()} == expected
    if not is_typed or not _makes_sense(**said):
        raise StagingError(f"{folder / MANIFEST} is damaged: it says {repr(said)[:200]}")
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
        raise PermissionError(f"others may write to it; if what is in it is yours: chmod go-w {folder}")
    for path in (folder, *folder.iterdir()):
        # Another process may be at work there.
        with suppress(FileNotFoundError):
            found = path.lstat()
            if found.st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to user {found.st_uid}")
            if path != folder and not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise PermissionError(f"{path} is neither a file nor a directory")
