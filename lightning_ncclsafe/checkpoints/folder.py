"""The folder of just-in-time checkpoints: their names, how one is written whole or not at all, how many are kept.

Whatever is there already stays as it is until a newer one is whole: nothing is ever written over.
"""

import os
import re
import shutil
import socket
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.exchange import wait_for

KEY = "lightning_ncclsafe"
"""Of what a checkpoint of ours has beside Lightning's own."""

REST = "meta.pt"
"""Where a checkpoint that is a folder has all but the state of the model and the optimizers, by Lightning's name."""

METADATA = ".metadata"
"""What PyTorch finds everything else by in such a folder."""

_NAME = re.compile(r"just-in-time-epoch=\d+-step=(\d+)(?:-v\d+)?\.ckpt")
_PARTIAL = ".just-in-time@{host}@{pid}@{id}.ncclsafe-partial"
_PARTIALS = re.compile(r"\.just-in-time@(?P<host>[^@]*)@(?P<pid>\d+)@[0-9a-f]+\.ncclsafe-partial")
# Nobody writes for so long, whichever host it was on.
_OLD_S = 86_400.0
# How long another host's folder may take to be seen.
_SEEN_S = 3.0
# Two jobs that share a folder come to the same step now and then, not so many times.
_MOST_NAMESAKES = 1000


def name_of(epoch: int, step: int, version: int = 0) -> str:
    """The name of a checkpoint.

    Args:
        epoch: Lightning's ``current_epoch``.
        step: Its ``global_step``.
        version: 0, unless the name is taken.
    """
    return f"just-in-time-epoch={epoch}-step={step}{f'-v{version}' if version else ''}.ckpt"


class CheckpointFolder:
    """Writes checkpoints into one folder.

    Args:
        path: The folder; made when the first one is written.
        keep: Most checkpoints of one run in it.
        is_mine: Whether what a checkpoint has under :data:`KEY` says that it is of this run.
    """

    def __init__(self, path: Path, *, keep: int, is_mine: Callable[[Any], bool]) -> None:
        self.path = path
        self._keep = keep
        self._is_mine = is_mine

    def write(self, epoch: int, step: int, write: Callable[[BinaryIO], None], may_finish: Callable[[], None]) -> Path:
        """Writes a checkpoint beside, has it on storage, reads it back, and only then gives it its name.

        Args:
            epoch: Lightning's ``current_epoch``.
            step: Its ``global_step``.
            write: Writes it to a file.
            may_finish: Called before it gets its name; what it raises leaves nothing behind.

        Returns:
            Its path.

        Raises:
            OSError: The folder does not take it, or has not kept what was written.
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
        _sync(self.path)
        # It is whole and has its name: what is left to do may fail.
        with suppress(Exception):
            self._remove_older(path)
        return path

    def begin_together(self) -> Path:
        """The folder that several ranks write a checkpoint to, each a file of its own; :meth:`finish_together` ends it.

        Raises:
            OSError: It cannot be made.
        """
        partial = self._partial()
        partial.mkdir()
        return partial

    def seen_together(self, name: str) -> Path:
        """The folder that another rank has begun, by its name.

        Raises:
            OSError: It is not there: this rank sees another storage.
        """
        partial = self.path / name
        # A file system of a network may show it a moment later.
        if not _PARTIALS.fullmatch(name) or not wait_for(partial.is_dir, deadline_s=_SEEN_S):
            raise FileNotFoundError(f"{partial} does not exist here; all hosts must see the same folder")
        return partial

    def finish_together(self, partial: Path, epoch: int, step: int, files: Mapping[str, int]) -> Path:
        """Gives a folder its name, if what is in it is what was written.

        Args:
            partial: The folder.
            epoch: Lightning's ``current_epoch``.
            step: Its ``global_step``.
            files: The length of each file, bytes.

        Returns:
            Its path.

        Raises:
            OSError: Storage has not kept it, or shows another folder to other ranks.
        """
        check_lengths(partial, files)
        _sync(partial)
        path = self._give_name(partial, epoch, step)
        _sync(self.path)
        with suppress(Exception):
            self._remove_older(path)
        return path

    def abandon(self, partial: Path) -> None:
        """Leaves nothing of a folder that never got its name."""
        shutil.rmtree(partial, ignore_errors=True)

    def _partial(self) -> Path:
        """A name beside, for what is not whole yet."""
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

    def _remove_older(self, newest: Path) -> None:
        """What other runs have put there, or cannot be read, is not ours to remove."""
        others = sorted(
            (path for path in self.path.iterdir() if _NAME.fullmatch(path.name) and path != newest),
            key=lambda path: path.stat().st_mtime_ns,
            reverse=True,
        )
        for path in [path for path in others if self._is_mine(own_part(path))][self._keep - 1 :]:
            if path.is_dir():
                # Not half of it is ever there under its name.
                shutil.rmtree(path.rename(self._partial()), ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _clear_left_behind(self) -> None:
        """By processes of this host that have ended while they were writing, or by any, long ago."""
        with suppress(OSError):
            for path, found in _matching(self.path.iterdir(), _PARTIALS):
                has_ended = found["host"] == _here() and not psutil.pid_exists(int(found["pid"]))
                if has_ended or time.time() - path.stat().st_mtime > _OLD_S:
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)


def _here() -> str:
    """This host, and whose process ids they are: a container may have its own of these, and the name of its host."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{socket.gethostname().replace('@', '')}-{space}"


def _take_files_name(partial: Path, path: Path) -> bool:
    """Whether the file has that name now, which nobody had."""
    try:
        # Unlike a rename, a hard link fails where the name is taken, on NFS as well.
        os.link(partial, path)
    except FileExistsError:
        return False
    except OSError:
        # A file system without them.
        if path.exists():
            return False
        partial.rename(path)
    return True


def _take_folders_name(partial: Path, path: Path) -> bool:
    """Likewise of a folder."""
    if path.exists():
        return False
    try:
        # Fails where there is a file, or a folder that is not empty, by now.
        partial.rename(path)
    except OSError:
        if path.exists():
            return False
        raise
    return True


def _matching(paths: Iterable[Path], pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    return [(path, found) for path in paths if (found := pattern.fullmatch(path.name)) is not None]


def write_synced(path: Path, write: Callable[[BinaryIO], object]) -> int:
    """Writes a new file and has it on storage; returns its length.

    Args:
        path: Its path; there is no file yet.
        write: Writes to it.

    Raises:
        OSError: Storage does not take it.
        Exception: Whatever the function raises.
    """
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def check_lengths(folder: Path, files: Mapping[str, int]) -> None:
    """Checks that each file is as long as it was written.

    Args:
        folder: Where they are.
        files: The length of each, bytes.

    Raises:
        OSError: One is not there, or not of that length.
    """
    for name, size in files.items():
        found = (folder / name).stat().st_size
        if found != size:
            raise OSError(f"{size:,} bytes of {name} were written, {found:,} are there")


def _sync(folder: Path) -> None:
    """A name is on storage once its folder is; what does not know that, needs no more."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def files_of(folder: Path) -> dict[str, int]:
    """The files of a checkpoint that is a folder, with their lengths, as far as it says so itself: those of ours do."""
    own = own_part(folder)
    files = own.get("files") if isinstance(own, dict) else None
    return {str(name): size for name, size in files.items()} if isinstance(files, dict) else {}


def read_back(path: Path, size: int) -> None:
    """Checks what was written: its length, its directory, and that each part lies where the directory says.

    Args:
        path: A file of ``torch.save``.
        size: Bytes that were written.

    Raises:
        OSError: Storage has not kept it.
    """
    found = path.stat().st_size
    if found != size:
        raise OSError(f"{size:,} bytes were written, {found:,} are there")
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                # Opening it reads what is right before it, and compares it with the directory.
                with archive.open(part) as opened:
                    if part.filename.endswith(".pkl"):
                        opened.read()
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise OSError(f"what was written cannot be read: {error}") from error


def own_part(path: Path) -> Any:
    """What a checkpoint has under :data:`KEY`; None where it cannot be read. Its tensors are not read for that."""
    with suppress(Exception):
        found = tensors.load_outline(path / REST if path.is_dir() else path)
        return found.get(KEY) if isinstance(found, dict) else None
    return None


def job_of(checkpoint: Path | Mapping[str, Any]) -> str:
    """What had started the job that has saved a checkpoint, in words; empty where that is not known.

    Args:
        checkpoint: Its path, or what it has in it.
    """
    part = own_part(checkpoint) if isinstance(checkpoint, Path) else checkpoint.get(KEY)
    job = part.get("job") if isinstance(part, Mapping) else ""
    return job if isinstance(job, str) else ""


def paths_of(folder: Path) -> list[Path]:
    """The checkpoints of ours in a folder."""
    with suppress(OSError):
        return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return []
