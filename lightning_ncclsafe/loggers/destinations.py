"""Where files of loggers are written to: a directory of a mounted file system, or below an fsspec URL.

Names of files are relative, with ``/``. Every call may block for as long as the storage does.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class LocalDestination:
    """A directory of a mounted file system.

    Attributes:
        path: The directory, as the user knows it.
        pace_s: Least pause between two writes, seconds.
        appends: Whether appended bytes can be read from the same file.
        folders: Its absolute paths on this host.
        device: Number of its device when the run began, or of that of what existed above it. A directory that is
            removed is created again, but not on the disk below a mount that is gone.
    """

    pace_s = 1.0
    appends = True

    def __init__(self, path: str) -> None:
        self.path = path
        # A program may change its working directory.
        self._folder = Path(path).absolute()
        self.folders: tuple[str, ...] = tuple({os.path.abspath(path), os.path.realpath(path)})
        self.device = _device_of(self._folder)

    def size(self, file: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return (self._folder / file).stat().st_size
        except FileNotFoundError:
            return None

    def append(self, file: str, data: bytes) -> None:
        """Appends in one system call, so that readers see whole records; creates the file and its directory if needed.

        Raises:
            OSError: If the storage refuses. A part may have been written.
        """
        handle = self._open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
        finally:
            os.close(handle)

    def read(self, file: str, start: int = 0) -> bytes:
        """The bytes of a file from ``start`` on; empty if there is no file."""
        try:
            with open(self._folder / file, "rb") as opened:
                opened.seek(start)
                return opened.read()
        except FileNotFoundError:
            return b""

    def replace(self, file: str, data: bytes) -> None:
        """Writes a whole file, by renaming a temporary one: readers see the old or the new one."""
        path = self._folder / file
        temporary = path.with_name(f".{path.name}.ncclsafe")
        handle = self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with open(handle, "wb") as opened:
                opened.write(data)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _open(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            if _device_of(path.parent) != self.device:
                raise OSError(f"the file system that {self.path} was on is no longer mounted") from None
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o666)


class RemoteDestination:
    """A directory of an fsspec file system. If it cannot append, each append becomes a separate numbered file.

    Args:
        path: The directory's URL.
    """

    # An append may create a new object or send the whole object again.
    pace_s = 10.0
    folders: tuple[str, ...] = ()
    # Some file systems can, but which ones is known only after an append.
    appends = False

    def __init__(self, path: str) -> None:
        from fsspec.core import url_to_fs

        self.path = path
        self._fs: Any
        self._fs, self._root = url_to_fs(path)
        self._tries_append = True
        # The last number of each file.
        self._numbers: dict[str, int] = {}

    def size(self, file: str) -> int | None:
        """Bytes of a file and of its numbered ones; None if there is none."""
        sizes = [self._size_of(file)]
        while (size := self._size_of(f"{file}.{len(sizes)}")) is not None:
            sizes.append(size)
        return None if sizes == [None] else sum(filter(None, sizes))

    def append(self, file: str, data: bytes) -> None:
        """Appends, or writes the next numbered file."""
        if self._tries_append:
            try:
                self._fs.makedirs(self._name(file).rpartition("/")[0], exist_ok=True)
                with self._open(file) as opened:
                    opened.write(data)
                return
            except (NotImplementedError, ValueError):
                self._tries_append = False
        # Checked even after a failure, as it may have been written anyway.
        number = self._numbers.get(file, 1)
        while self._fs.exists(self._name(f"{file}.{number}")):
            number += 1
        self._numbers[file] = number
        self._fs.pipe_file(self._name(f"{file}.{number}"), data)

    def _open(self, file: str) -> Any:
        try:
            return self._fs.open(self._name(file), "ab")
        except FileNotFoundError:  # some append only to existing files, as fsspec's memory did until 2025
            return self._fs.open(self._name(file), "wb")

    def read(self, file: str, start: int = 0) -> bytes:
        """The bytes of a file from ``start`` on; empty if there is no file."""
        try:
            return bytes(self._fs.cat_file(self._name(file), start=start or None))
        except FileNotFoundError:
            return b""

    def replace(self, file: str, data: bytes) -> None:
        """Writes a whole file: object stores show the old one until the new one is complete."""
        self._fs.makedirs(self._name(file).rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(self._name(file), data)

    def _size_of(self, name: str) -> int | None:
        try:
            return int(self._fs.size(self._name(name)))
        except FileNotFoundError:
            return None

    def _name(self, file: str) -> str:
        return f"{self._root.rstrip('/')}/{file}"


Destination = LocalDestination | RemoteDestination


def open_destination(path: str) -> Destination:
    """The destination at a path or a URL (``"s3://…"``)."""
    return RemoteDestination(path) if "://" in path else LocalDestination(path)


def _device_of(path: Path) -> int:
    """The device that a path is on, or would be on if created."""
    for there in (path.absolute(), *path.absolute().parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            return there.stat().st_dev
    return -1
