"""Brings to storage what a process that is gone has left in local staging."""

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path

from lightning_ncclsafe.loggers.destination import open_destination
from lightning_ncclsafe.loggers.files import FilesSink
from lightning_ncclsafe.loggers.frames import Frame
from lightning_ncclsafe.loggers.store import MANIFEST, SCHEMA, Store

_LOCK = "lock"
_folders = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Whose staging a folder is.

    Attributes:
        logger: Class name of the logger.
        kind: ``"files"`` for frames that belong into files below ``destination``, ``"calls"`` for calls of a logger.
        destination: The directory that the logger writes to, or a path or URL for people.
        root: The logger's ``save_dir``: runs with the same one are of the same project.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What became of a folder of local staging.

    Attributes:
        folder: The folder.
        manifest: Whose it is.
        points: Points brought to storage.
        records: Everything else brought to storage.
        to: Where they are now.
        problem: Why something is still in the folder; empty if nothing is.
    """

    folder: Path
    manifest: Manifest
    points: int = 0
    records: int = 0
    to: str = ""
    problem: str = ""


class StagingError(Exception):
    """A folder is no local staging, or not of a kind this version reads; its text says which."""


def default_staging_dir() -> Path:
    """``ncclsafe-<user id>/logs`` in the directory for temporary files."""
    return Path(tempfile.gettempdir()) / f"ncclsafe-{os.getuid()}" / "logs"


def make_staging(staging_dir: Path, manifest: Manifest) -> tuple[Path, int]:
    """Makes a folder of local staging and claims it for this process.

    Args:
        staging_dir: Where; made, for this user only.
        manifest: Whose it is; host, process and time are filled in.

    Returns:
        The folder, and the handle that holds the claim until it is closed or the process ends.

    Raises:
        OSError: If it cannot be made, or belongs to somebody else.
    """
    staging_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = staging_dir.stat().st_uid
    if owner != os.getuid():
        raise PermissionError(f"{staging_dir} belongs to user {owner}; set LoggerOffload(staging_dir=...)")
    here = replace(manifest, host=socket.gethostname(), pid=os.getpid(), created_ns=time.time_ns())
    folder = staging_dir / f"{manifest.logger}-{here.created_ns}-{here.pid}-{next(_folders)}"
    folder.mkdir(mode=0o700)
    (folder / MANIFEST).write_text(json.dumps({"schema": SCHEMA, **asdict(here)}))
    handle = _claim(folder)
    if handle is None:
        raise OSError(f"{folder} is claimed by another process")
    return folder, handle


def read_manifest(folder: Path) -> Manifest:
    """Whose staging a folder is.

    Raises:
        StagingError: If it is none, or of another version.
    """
    try:
        said = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise StagingError(f"{folder} is no local staging of ncclsafe: {error}") from error
    schema = said.pop("schema", None) if isinstance(said, dict) else None
    if schema != SCHEMA:
        raise StagingError(f"{folder} has schema {schema!r}; this version of ncclsafe reads schema {SCHEMA}.")
    expected = {field.name: int if field.name in ("pid", "created_ns") else str for field in fields(Manifest)}
    if {name: type(value) for name, value in said.items()} != expected:
        raise StagingError(f"{folder / MANIFEST} is damaged: it says {said!r:.200}")
    return Manifest(**said)


def leftovers(staging_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Folders of local staging that are in a directory, and are not this process's own."""
    with suppress(OSError):
        for folder in sorted(path for path in staging_dir.iterdir() if (path / MANIFEST).is_file()):
            with suppress(StagingError):
                manifest = read_manifest(folder)
                if manifest.pid != os.getpid() or manifest.host != socket.gethostname():
                    yield folder, manifest


def recover(folder: Path, replay: Callable[[Sequence[Frame]], None] | None = None) -> Recovered:
    """Brings what is in a folder to storage, and removes the folder when all of it is there.

    Args:
        folder: The folder of local staging.
        replay: Makes calls of the logger they were meant for. None: they are written down, in files beside its logs.

    Raises:
        StagingError: If the folder is no local staging.
    """
    manifest = read_manifest(folder)
    done = Recovered(folder=folder, manifest=manifest)
    with _claimed(folder) as is_claimed:
        if not is_claimed:
            return replace(done, problem=f"process {manifest.pid} on {manifest.host} still writes there")
        try:
            return _bring(Store(folder), done, replay)
        except OSError as error:
            return replace(done, problem=f"{manifest.destination or manifest.logger}: {error!r}")


def _bring(store: Store, done: Recovered, replay: Callable[[Sequence[Frame]], None] | None) -> Recovered:
    manifest = done.manifest
    to = manifest.destination if manifest.kind == "files" else manifest.root or str(done.folder.parent)
    sink = FilesSink(open_destination(to), store.anchors, store.note)
    while (portion := store.read()) is not None:
        if manifest.kind == "files":
            sink.deliver(portion.frames)
        elif replay is not None:
            replay(portion.frames)
        else:
            sink.deliver([_written_down(frame, manifest) for frame in portion.frames])
        store.release(portion)
        done = replace(
            done,
            points=done.points + sum(frame.points for frame in portion.frames),
            records=done.records + sum(frame.records for frame in portion.frames),
        )
    store.close()
    return replace(done, to=manifest.identity if manifest.kind == "calls" and replay is not None else to)


def _written_down(frame: Frame, manifest: Manifest) -> Frame:
    """A call as a line of a file: its points as a row, anything else as it was staged."""
    name = "-".join(filter(str.isalnum, f"{manifest.logger} {manifest.created_ns}".split()))
    with suppress(ValueError, KeyError):
        said = json.loads(frame.body)
        row = json.dumps({**said["values"], "step": said["step"]}).encode()
        return replace(frame, kind="rows", file=f"recovered-{name}.csv", body=row)
    return replace(frame, kind="append", file=f"recovered-{name}.jsonl", body=frame.body + b"\n")


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    handle = _claim(folder)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _claim(folder: Path) -> int | None:
    """A lock that ends with the process; not inherited by its children, as a lock of flock would be."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
