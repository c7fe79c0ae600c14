"""What a process has open, by ``/proc/PID/fd``. By name, peers find the files in memory that a rank shares."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def open_files(pid: int, proc: Path = PROC) -> Iterator[tuple[Path, str]]:
    """The link in ``/proc`` and the target of each descriptor of a process, as far as this user may see."""
    folder = proc / str(pid) / "fd"
    numbers: list[str] = []
    with suppress(OSError):
        numbers = sorted(os.listdir(folder), key=int)
    for number in numbers:
        with suppress(OSError):  # closed meanwhile
            yield folder / number, os.readlink(folder / number)


def files_in_memory(pid: int) -> Iterator[tuple[Path, str]]:
    """The link in ``/proc`` and the name of each file in memory that a process of this user has open."""
    return ((link, name) for link, target in open_files(pid) if (name := name_in_memory(target)))


def name_in_memory(target: str) -> str:
    """The name of a file in memory, by the target of a link to it; empty for other files."""
    # The kernel calls each of these files deleted.
    return target.removeprefix("/memfd:").removesuffix(" (deleted)") if target.startswith("/memfd:") else ""
