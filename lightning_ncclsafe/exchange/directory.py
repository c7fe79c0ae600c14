"""An exchange of files in a folder that all ranks see: before there is a store, and after its host is dead."""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from lightning_ncclsafe.exchange.interface import ExchangeError


class DirectoryExchange:
    """An exchange of files, one a key. The folder is made, private to the user, when the first value is published.

    Args:
        folder: A folder that no other job uses.
    """

    lost = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value: readers see the old one or the new one, never a part."""
        written = self._write(value)
        try:
            written.replace(self._path(key))
        except OSError as error:
            raise self._error("publish in", error) from error

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Publishes a value unless the key has one; returns the value that stands."""
        written = self._write(value)
        try:
            # Unlike a rename, a hard link fails where the name is taken, on NFS as well.
            os.link(written, self._path(key))
            return value
        except FileExistsError:
            return self._path(key).read_bytes()
        except OSError as error:
            raise self._error("publish in", error) from error
        finally:
            written.unlink(missing_ok=True)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those keys that have one."""
        if self._closed:
            raise ExchangeError(f"The exchange in {str(self._folder)!r} was used after it was closed.")
        found = {}
        for key in keys:
            try:
                found[key] = self._path(key).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._error("read", error) from error
        return found

    def close(self) -> None:
        """Ends this rank's use. What was published stays for ranks that are still reading."""
        self._closed = True

    def remove(self) -> None:
        """Removes the folder; for the last rank."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def _write(self, value: bytes) -> Path:
        if self._closed:
            raise ExchangeError(f"The exchange in {str(self._folder)!r} was used after it was closed.")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # mkstemp makes files that only this user can read.
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".")
            with os.fdopen(handle, "wb") as file:
                file.write(value)
            return Path(name)
        except OSError as error:
            raise self._error("write to", error) from error

    def _error(self, doing: str, error: OSError) -> ExchangeError:
        return ExchangeError(f"Ranks could not {doing} the folder {str(self._folder)!r}: {error}.")
