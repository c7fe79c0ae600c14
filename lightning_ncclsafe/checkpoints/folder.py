"""The folder of just-in-time checkpoints: their names, how one is written atomically, and how many are kept.

Existing checkpoints stay as they are until a newer one is complete: nothing is ever overwritten.
"""

import os
import re
import shutil
import time
import uuid
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.code.this_host import process_space
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


class CheckpointFolder:
    """Writes checkpoints into one folder.

    Args:
        path: The folder; made when the first one is written.
        keep: Most checkpoints of one run in it.
        run: The run, as the entries of its checkpoints under :data:`KEY` have it.
    """

    def __init__(self, path: Path, *, keep: int, run: str) -> None:
        self.path = path
        self._keep = keep
        self._run = run

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
            return self._finish(partial, epoch, step)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

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
        return self._finish(partial, epoch, step)

    def _partial(self) -> Path:
        """A temporary name for an incomplete checkpoint."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_left_behind()
        return self.path / _PARTIAL.format(host=process_space(), pid=os.getpid(), id=uuid.uuid4().hex)

    def _finish(self, partial: Path, epoch: int, step: int) -> Path:
        for version in range(_MOST_NAMESAKES):
            path = self.path / f"just-in-time-epoch={epoch}-step={step}{f'-v{version}' if version else ''}.ckpt"
            if _take_name(partial, path):
                _sync(self.path)
                # The checkpoint is complete; the rest may fail.
                with suppress(Exception):
                    self._remove_older(path)
                return path
        raise FileExistsError(f"{self.path} has {_MOST_NAMESAKES} checkpoints of step {step}")

    def _remove_older(self, newest: Path) -> None:
        """Removes older checkpoints of this run, but none of other runs, and none that cannot be read."""
        others = sorted(
            (path for path in self.path.iterdir() if _NAME.fullmatch(path.name) and path != newest),
            key=lambda path: path.stat().st_mtime_ns,
            reverse=True,
        )
        for path in [path for path in others if own_part(path).get("run") == self._run][self._keep - 1 :]:
            # Renamed first, so that half a checkpoint never has its name.
            _remove(path.rename(self._partial()) if path.is_dir() else path)

    def _clear_left_behind(self) -> None:
        """Removes temporary files of ended processes of this host, and old ones of any process."""
        with suppress(OSError):
            for path in self.path.iterdir():
                if (found := _PARTIALS.fullmatch(path.name)) is None:
                    continue
                has_ended = found["host"] == process_space() and not psutil.pid_exists(int(found["pid"]))
                if has_ended or time.time() - path.stat().st_mtime > _OLD_S:
                    _remove(path)


def _take_name(partial: Path, path: Path) -> bool:
    """Renames a file or a folder unless the name is taken; returns whether it did."""
    if not partial.is_dir():
        try:
            # Unlike a rename, a hard link fails where the name is taken, on NFS as well.
            os.link(partial, path)
            return True
        except FileExistsError:
            return False
        except OSError:
            pass  # the file system has no hard links
    if path.exists():
        return False
    try:
        # For a folder, fails if there is a file, or a folder that is not empty.
        partial.rename(path)
    except OSError:
        if path.exists():
            return False
        raise
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
    files = own_part(folder).get("files")
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


def own_part(checkpoint: Path | Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a checkpoint under :data:`KEY`, given its path or its contents; empty if there is none to read.

    Tensors are not read.
    """
    with suppress(Exception):
        content: Any = checkpoint
        if isinstance(checkpoint, Path):
            content = tensors.load_outline(checkpoint / REST if checkpoint.is_dir() else checkpoint)
        part = content[KEY]
        return part if isinstance(part, dict) else {}
    return {}


def job_of(checkpoint: Path | Mapping[str, Any]) -> str:
    """The job that saved a checkpoint, given by its path or its contents, in words; empty if unknown."""
    job = own_part(checkpoint).get("job")
    return job if isinstance(job, str) else ""


def paths_of(folder: Path) -> list[Path]:
    """Our checkpoints in a folder."""
    with suppress(OSError):
        return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return []
