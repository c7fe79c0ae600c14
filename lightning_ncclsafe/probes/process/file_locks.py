"""For which lock on a file a process waits in the kernel, and which process has that."""

import os
from pathlib import Path

from lightning_ncclsafe.facts import FileLock
from lightning_ncclsafe.probes.absent import or_none

_PROC = Path("/proc")


def awaited_lock(pid: int, proc: Path = _PROC) -> FileLock | None:
    """The lock that a process waits for; None if it waits for none, or the kernel does not tell.

    Asks the file system of each file that the process has open, which may not answer.

    Args:
        pid: Process id.
        proc: Root of the file system that tells of processes.
    """
    lines = [line.split() for line in (proc / "locks").read_text().splitlines()]
    # Behind each lock follow those who wait for it: "3: -> FLOCK ADVISORY WRITE 4711 08:01:131104 0 EOF".
    holders = {line[0]: line for line in lines if line[1] != "->"}
    waits = next((line for line in lines if line[1] == "->" and line[5] == str(pid)), None)
    if waits is None:
        return None
    holder = holders.get(waits[0], [])
    return FileLock(path=_path_of(proc / str(pid) / "fd", waits[6]), holder=int(holder[4]) if holder else 0)


def _path_of(folder: Path, file: str) -> str:
    """The open file with this number; of a file system in layers, the device is another one."""
    number = int(file.rpartition(":")[2])
    for name in or_none(lambda: sorted(os.listdir(folder))) or []:
        if or_none(lambda name=name: os.stat(folder / name).st_ino) == number:  # type: ignore[misc]
            return or_none(lambda name=name: os.readlink(folder / name)) or ""  # type: ignore[misc]
    return ""
