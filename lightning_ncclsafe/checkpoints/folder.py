"""The folder of just-in-time checkpoints: their names, how one is written atomically, and how many are kept.

Existing checkpoints stay as they are until a newer one is complete: nothing is ever overwritten.
"""

import os
import re
import shutil
import socket
import time
import uuid
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.exchange import wait_for

KEY = "lightning_ncclsafe"
"""The key of our own entry in a checkpoint, next to Lightning's."""

REST = "meta.pt"
"""The file, named by Lightning, with everything but model and optimizer states, if a checkpoint is a folder."""

METADATA = ".metadata"
"""The file with PyTorch's index of such a folder."""

_NAME = re.compile(r"just-in-time-epoch=\d+-step=(\d+)(?:-v\d+)?\.ckpt")
_PARTIAL = ".just-in-time@{host}@{pid}@{id}.ncclsafe-partial"
_PARTIALS = re.compile(r"\.just-in-time@(?P<host>[^@]*)@(?P<pid>\d+)@[0-9a-f]+\.ncclsafe-partial")
# No process writes for this long, on any host.
_OLD_S = 86_400.0
# How long it may take until another host's folder becomes visible.
_SEEN_S = 3.0
# Two jobs that share a folder reach the same step now and then, but not this often.
_MOST_NAMESAKES = 1000


def name_of(epoch: int, step: int, version: int = 0) -> str:
    """The name of a checkpoint.

    Args:
        version: 0, unless the name is taken.
    """
    return f"just-in-time-epoch={epoch}-step={step}{f'-v{version}' if version else ''}.ckpt"


class CheckpointFolder:
    """Writes checkpoints into one folder.

    Args:
        path: The folder; made when the first one is written.
        keep: Most checkpoints of one run in it.
        is_mine: Whether a checkpoint is of this run, according to its entry under :data:`KEY`.
    """

    def __init__(self, path: Path, *, keep: int, is_mine: Callable[[Any], bool]) -> None:
        self.path = path
        self._keep = keep
        self._is_mine = is_mine

    def write(self, epoch: int, step: int, write: Callable[[BinaryIO], None], may_finish: Callable[[], None]) -> Path:
        """Writes a checkpoint to a temporary file, syncs it, reads it back, and only then renames it.

        Args:
            may_finish: Called before the rename; if it raises, nothing is left behind.

        Returns:
            Its path.

        Raises:
            OSError: The folder cannot be written to, or did not keep what was written.
            Exception: Whatever the two functions raise.
        """
        partial = self._partial()
        try:
            read_back(partial, write_synced(partial, write))
            may_finish()
            path = self._give_name(partial, epoch, step)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        self._after(path)
        return path

    def begin_together(self) -> Path:
        """Makes the folder that several ranks write one checkpoint to; :meth:`finish_together` completes it.

        Raises:
            OSError: The folder cannot be made.
        """
        partial = self._partial()
        partial.mkdir()
        return partial

    def seen_together(self, name: str) -> Path:
        """The folder that another rank has begun, by its name.

        Raises:
            OSError: The folder does not exist here: this rank sees other storage.
        """
        partial = self.path / name
        # On a network file system, it may become visible a moment later.
        if not _PARTIALS.fullmatch(name) or not wait_for(partial.is_dir, deadline_s=_SEEN_S):
            raise FileNotFoundError(f"{partial} does not exist here; all hosts must see the same folder")
        return partial

    def finish_together(self, partial: Path, epoch: int, step: int, files: Mapping[str, int]) -> Path:
        """Renames the folder, if its files are complete.

        Args:
            files: The length of each file, bytes.

        Returns:
            Its path.

        Raises:
            OSError: Storage did not keep the files, or other ranks see another folder.
        """
        check_lengths(partial, files)
        _sync(partial)
        path = self._give_name(partial, epoch, step)
        self._after(path)
        return path

    def abandon(self, partial: Path) -> None:
        """Removes a folder that was never completed."""
        shutil.rmtree(partial, ignore_errors=True)

    def _partial(self) -> Path:
        """A temporary name for an incomplete checkpoint."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_left_behind()
        return self.path / _PARTIAL.format(host=_here(), pid=os.getpid(), id=uuid.uuid4().hex)

    def _give_name(self, partial: Path, epoch: int, step: int) -> Path:
        take = _take_folders_name if partial.is_dir() else _take_files_name
        for version in range(_MOST_NAMESAKES):
            path = self.path / name_of(epoch, step, version)
            if take(partial, path):
                return path
        raise FileExistsError(f"{self.path} has {_MOST_NAMESAKES} checkpoints of step {step}")

    def _after(self, path: Path) -> None:
        _sync(self.path)
        # The checkpoint is complete; the rest may fail.
        with suppress(Exception):
            self._remove_older(path)

    def _remove_older(self, newest: Path) -> None:
        """Removes older checkpoints of this run, but none of other runs, and none that cannot be read."""
        others = sorted(
            (path for path in self.path.iterdir() if _NAME.fullmatch(path.name) and path != newest),
            key=lambda path: path.stat().st_mtime_ns,
            reverse=True,
        )
        for path in [path for path in others if self._is_mine(own_part(path))][self._keep - 1 :]:
            if path.is_dir():
                # Renamed first, so that half a checkpoint never has its name.
                shutil.rmtree(path.rename(self._partial()), ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _clear_left_behind(self) -> None:
        """Removes temporary files of ended processes of this host, and old ones of any process."""
        with suppress(OSError):
            for path in self.path.iterdir():
                if (found := _PARTIALS.fullmatch(path.name)) is None:
                    continue
                has_ended = found["host"] == _here() and not psutil.pid_exists(int(found["pid"]))
                if has_ended or time.time() - path.stat().st_mtime > _OLD_S:
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)


def _here() -> str:
    """This host and its namespace of process ids: a container may have its own namespace, but its host's name."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{socket.gethostname().replace('@', '')}-{space}"


def _take_files_name(partial: Path, path: Path) -> bool:
    """Renames a file unless the name is taken; returns whether it did."""
    try:
        # Unlike a rename, a hard link fails where the name is taken, on NFS as well.
        os.link(partial, path)
    except FileExistsError:
        return False
    except OSError:
        # The file system has no hard links.
        if path.exists():
            return False
        partial.rename(path)
    return True


def _take_folders_name(partial: Path, path: Path) -> bool:
    """Renames a folder unless the name is taken; returns whether it did."""
    if path.exists():
        return False
    try:
        # Fails if there is a file, or a folder that is not empty.
        partial.rename(path)
    except OSError:
        if path.exists():
            return False
        raise
    return True


def write_synced(path: Path, write: Callable[[BinaryIO], object]) -> int:
    """Writes and syncs a new file; returns its length.

    Raises:
        OSError: The file cannot be written.
        Exception: Whatever the function raises.
    """
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def check_lengths(folder: Path, files: Mapping[str, int]) -> None:
    """Checks that each file is as long as it was written.

    Raises:
        OSError: A file is missing, or has another length.
    """
    for name, size in files.items():
        found = (folder / name).stat().st_size
        if found != size:
            raise OSError(f"{size:,} bytes of {name} were written, {found:,} are there")


def _sync(folder: Path) -> None:
    """Syncs a folder, so that the names in it are on storage; ignored if the file system cannot do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def files_of(folder: Path) -> dict[str, int]:
    """The files of a checkpoint that is a folder, with their lengths, if our entry in it lists them."""
    own = own_part(folder)
    files = own.get("files") if isinstance(own, dict) else None
    return {str(name): size for name, size in files.items()} if isinstance(files, dict) else {}


def read_back(path: Path, size: int) -> None:
    """Checks a written file: its length, its zip directory, and that each part is where the directory says.

    Args:
        path: A file of ``torch.save``.
        size: Bytes that were written.

    Raises:
        OSError: Storage did not keep the file.
    """
    found = path.stat().st_size
    if found != size:
        raise OSError(f"{size:,} bytes were written, {found:,} are there")
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                # Opening a part compares the header before it with the directory.
                with archive.open(part) as opened:
                    if part.filename.endswith(".pkl"):
                        opened.read()
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise OSError(f"what was written cannot be read: {error}") from error


def own_part(path: Path) -> Any:
    """The entry of a checkpoint under :data:`KEY`; None if it cannot be read. Tensors are not read."""
    with suppress(Exception):
        found = tensors.load_outline(path / REST if path.is_dir() else path)
        return found.get(KEY) if isinstance(found, dict) else None
    return None


def job_of(checkpoint: Path | Mapping[str, Any]) -> str:
    """The job that saved a checkpoint, given by its path or its contents, in words; empty if unknown."""
    part = own_part(checkpoint) if isinstance(checkpoint, Path) else checkpoint.get(KEY)
    job = part.get("job") if isinstance(part, Mapping) else ""
    return job if isinstance(job, str) else ""


def paths_of(folder: Path) -> list[Path]:
    """Our checkpoints in a folder."""
    with suppress(OSError):
        return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return []
