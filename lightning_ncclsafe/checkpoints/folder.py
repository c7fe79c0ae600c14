"""The folder of just-in-time checkpoints: their names, how one is written whole or not at all, how many are kept.

Whatever is there already stays as it is until a newer one is whole: nothing is ever written over.
"""

import os
import re
import socket
import uuid
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from lightning_ncclsafe import _torch

KEY = "lightning_ncclsafe"
"""Of what a checkpoint of ours has beside Lightning's own."""

_NAME = re.compile(r"just-in-time-epoch=\d+-step=(\d+)(?:-v\d+)?\.ckpt")
_PARTIAL = ".just-in-time@{host}@{pid}@{id}.ncclsafe-partial"
_PARTIALS = re.compile(r"\.just-in-time@(?P<host>[^@]*)@(?P<pid>\d+)@[0-9a-f]+\.ncclsafe-partial")
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
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_left_behind()
        name = _PARTIAL.format(host=socket.gethostname().replace("@", ""), pid=os.getpid(), id=uuid.uuid4().hex)
        partial = self.path / name
        try:
            with partial.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            read_back(partial, size)
            may_finish()
            path = self._give_name(partial, epoch, step)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        self._sync()
        # It is whole and has its name: what is left to do may fail.
        with suppress(Exception):
            self._remove_older(path)
        return path

    def _give_name(self, partial: Path, epoch: int, step: int) -> Path:
        for version in range(_MOST_NAMESAKES):
            path = self.path / name_of(epoch, step, version)
            try:
                # Unlike a rename, a hard link fails where the name is taken, on NFS as well.
                os.link(partial, path)
            except FileExistsError:
                continue
            except OSError:
                # A file system without them.
                if path.exists():
                    continue
                partial.rename(path)
            return path
        raise FileExistsError(f"{self.path} has {_MOST_NAMESAKES} checkpoints of step {step}")

    def _sync(self) -> None:
        """A name is on storage once its folder is; what does not know that, needs no more."""
        with suppress(OSError):
            handle = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _remove_older(self, newest: Path) -> None:
        """What other runs have put there, or cannot be read, is not ours to remove."""
        others = sorted(
            (path for path in self.path.iterdir() if _NAME.fullmatch(path.name) and path != newest and path.is_file()),
            key=lambda path: path.stat().st_mtime_ns,
            reverse=True,
        )
        for path in [path for path in others if self._is_mine(own_part(path))][self._keep - 1 :]:
            path.unlink(missing_ok=True)

    def _clear_left_behind(self) -> None:
        """By processes of this host that have ended while they were writing."""
        with suppress(OSError):
            for path, found in _matching(self.path.iterdir(), _PARTIALS):
                if found["host"] == socket.gethostname().replace("@", "") and not psutil.pid_exists(int(found["pid"])):
                    path.unlink(missing_ok=True)


def _matching(paths: Iterable[Path], pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    return [(path, found) for path in paths if (found := pattern.fullmatch(path.name)) is not None]


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
        found = _torch.load_plain(path)
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
