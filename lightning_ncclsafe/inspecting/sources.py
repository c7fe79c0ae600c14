"""The files of a rank: its sources, which may lie in a container, and storage that may not answer."""

import linecache
import os
import re
import tokenize
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.process.stacks import is_user_code

_STORAGE_S = 3.0
# Python's library of any installation: the rank's need not be this process's.
_LIBRARY = re.compile(r"/lib(?:64)?/python\d[\d.]*/|/python\d+\.zip/")

T = TypeVar("T")


def from_storage(read: Callable[[], T], otherwise: T, *, within_s: float | None = None) -> T:
    """The result of ``read``; ``otherwise`` if it raises or storage does not answer, which may be what hangs."""
    with suppress(Exception):
        return SideThread("ncclsafe-storage").call(read, _STORAGE_S if within_s is None else within_s)
    return otherwise


def folder_of(pid: int) -> str:
    """The working folder of a process; empty if unknown."""
    return or_none(lambda: os.readlink(f"/proc/{pid}/cwd")) or ""


def whole(file: str, folder: str) -> str:
    """The full path of a file that a frame names relative to the working folder."""
    is_whole = os.path.isabs(file) or file.startswith("<") or not folder
    return file if is_whole else os.path.join(folder, file)


def is_users_file(file: str) -> bool:
    """Whether a source file of a rank is the user's own, whichever Python the rank runs."""
    return is_user_code(file) and _LIBRARY.search(file) is None


def remember_sources(pid: int, files: Iterable[str], *, processes: Path = Path("/proc")) -> None:
    """Lets :mod:`linecache` give the rank's own version of files: in a container they lie below another root.

    A file of the same name on this side may be another version.
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
            # The file is not text, or its name is impossible, for which Python would raise again.
            _remember(file, "")


def _remember(file: str, text: str) -> None:
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def _is_here(file: str, inside: Path) -> bool:
    try:
        return os.path.samefile(file, inside)
    except FileNotFoundError:
        return not inside.exists()
