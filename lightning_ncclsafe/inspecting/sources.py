"""The files of a rank: its sources, which may lie in a container of its own, and storage that may not answer."""

import linecache
import os
import tokenize
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.probes.absent import or_none

_STORAGE_S = 3.0

T = TypeVar("T")


def from_storage(read: Callable[[], T], otherwise: T, *, within_s: float | None = None) -> T:
    """What a read gives, unless it raises or the storage of a rank does not answer, as it may be that which hangs."""
    with suppress(Exception):
        return SideThread("ncclsafe-storage").call(read, _STORAGE_S if within_s is None else within_s)
    return otherwise


def folder_of(pid: int) -> str:
    """The folder that a process is in; empty where that is not known."""
    return or_none(lambda: os.readlink(f"/proc/{pid}/cwd")) or ""


def whole(file: str, folder: str) -> str:
    """A script that was named without its folder is named so in its frames."""
    is_whole = os.path.isabs(file) or file.startswith("<") or not folder
    return file if is_whole else os.path.join(folder, file)


def remember_sources(pid: int, files: Iterable[str], *, processes: Path = Path("/proc")) -> None:
    """Of a rank in a container the files lie below its own root; whoever asks for their lines is given these.

    What lies here under the same name may be another version.
    """
    for file in files:
        inside = Path(f"{processes}/{pid}/root{file}")
        try:
            if not (file.startswith("<") or file in linecache.cache or _is_here(file, inside)):
                with tokenize.open(inside) as source:
                    _remember(file, source.read())
        except OSError:
            continue
        except (ValueError, SyntaxError):
            # It is no text, or no file can have the name, for which Python would raise again.
            _remember(file, "")


def _remember(file: str, text: str) -> None:
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def _is_here(file: str, inside: Path) -> bool:
    try:
        return os.path.samefile(file, inside)
    except FileNotFoundError:
        return not inside.exists()
