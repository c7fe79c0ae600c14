"""An exchange of files in a folder that all ranks see: before there is a store, and after its host has died."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import psutil

from lightning_ncclsafe.code.this_host import process_space
from lightning_ncclsafe.exchange.interface import ExchangeError, Undivided
from lightning_ncclsafe.exchange.waiting import wait_for

# Which processes have published in a folder; and that its parent folder is ours, too.
_USER = ".user@"
_PARENT_IS_OURS = ".parent-is-ours"
# The errors of a file system without hard links, such as those over object stores and SMB.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_CLAIM = "@claim"
# How long a rank may take from its claim to the value.
_CLAIMED_S = 0.5


class DirectoryExchange(Undivided):
    """An exchange of files, one a key. The folder is made, private to the user, when the first value is published.

    Every process that publishes leaves a note there, so that the last one removes what killed ranks have left.

    Args:
        folder: A folder that no other job uses.
    """

    lost = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = False
        self._published: set[Path] = set()
        self._note: Path | None = None

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value: readers see the old one or the new one, never a part."""
        written = self._write(value)
        try:
            written.replace(self._path(key))
        except OSError as error:
            with suppress(OSError):
                written.unlink(missing_ok=True)
            raise self._error("publish in", error) from error
        self._published.add(self._path(key))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Publishes a value unless the key has one; returns the value that the key has then."""
        written = self._write(value)
        try:
            # Unlike a rename, a hard link fails where the name is taken, on NFS as well.
            os.link(written, self._path(key))
            self._published.add(self._path(key))
            return value
        except FileExistsError:
            return self._taken(key)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise self._error("publish in", error) from error
            return value if self._claim(key, written) else self._taken(key)
        finally:
            with suppress(OSError):
                written.unlink(missing_ok=True)

    def _claim(self, key: str, written: Path) -> bool:
        """Publishes a value where there are no hard links, unless the key has one or will have one in a moment."""
        claim, path = self._path(f"{key}{_CLAIM}"), self._path(key)
        try:
            if path.exists():
                return False
            claim.touch(mode=0o600, exist_ok=False)
            self._published.update((claim, path))
            written.replace(path)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._error("publish in", error) from error
        return True

    def _taken(self, key: str) -> bytes:
        """The value that another rank has given a key; it may be deleted meanwhile, the folder with the last rank."""
        found = wait_for(lambda: [*self.get_many([key]).values()], deadline_s=_CLAIMED_S)
        if not found:
            raise ExchangeError(f"The value of {key} in the folder {str(self._folder)!r} is gone.")
        return found[0]

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those keys that have one."""
        self._check_open()
        found = {}
        for key in keys:
            try:
                found[key] = self._path(key).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._error("read", error) from error
        return found

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys."""
        self._check_open()
        for path in (self._path(f"{key}{end}") for key in keys for end in ("", _CLAIM)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._error("delete in", error) from error
            self._published.discard(path)

    def close(self) -> None:
        """Deletes what this rank has published; the last rank deletes the folder, with all that is left in it."""
        self._closed = True
        if self._note is None:
            return
        with suppress(OSError):
            for path in (*self._published, self._note):
                path.unlink(missing_ok=True)
            if not any(map(_is_used, self._folder.glob(f"{_USER}*"))):
                parent_is_ours = (self._folder / _PARENT_IS_OURS).exists()
                shutil.rmtree(self._folder, ignore_errors=True)
                if parent_is_ours:
                    self._folder.parent.rmdir()  # unless there is a report in it now

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def _check_open(self) -> None:
        if self._closed:
            raise ExchangeError(f"The exchange in {str(self._folder)!r} was used after it was closed.")

    def _write(self, value: bytes) -> Path:
        self._check_open()
        try:
            is_new = not self._folder.parent.exists()
            self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(exist_ok=True, mode=0o700)
            found = self._folder.stat()
            # Another user's folder of that name could feed ranks anything.
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise PermissionError("it belongs to another user, or others may write to it")
            if is_new:
                (self._folder / _PARENT_IS_OURS).touch(mode=0o600)
            # mkstemp makes files that only this user can read.
            if self._note is None:
                prefix = f"{_USER}{process_space()}@{os.getpid()}@"
                handle, note = tempfile.mkstemp(dir=self._folder, prefix=prefix)
                os.close(handle)
                self._note = Path(note)
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".")
        except OSError as error:
            raise self._error("write to", error) from error
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(value)
        except OSError as error:
            with suppress(OSError):
                Path(name).unlink(missing_ok=True)
            raise self._error("write to", error) from error
        return Path(name)

    def _error(self, doing: str, error: OSError) -> ExchangeError:
        return ExchangeError(f"Ranks could not {doing} the folder {str(self._folder)!r}: {error}.")


def _is_used(note: Path) -> bool:
    """Whether a process that has published in a folder still runs; one on another host counts as running."""
    _, space, pid, _ = note.name.rsplit("@", 3)
    if space != process_space():
        return True
    with suppress(psutil.Error, ValueError):
        return psutil.Process(int(pid)).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
