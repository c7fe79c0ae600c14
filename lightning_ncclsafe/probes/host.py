"""Memory, swap, cores and processes of this host, from psutil; what it lacks, from /proc and the control group."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from lightning_ncclsafe.facts import HostFacts, ProcessFacts

T = TypeVar("T")

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
# cgroup v1 says "no limit" with the largest page-aligned signed number.
_UNLIMITED_BYTES = 1 << 60


class HostProbe:
    """Counts what happened on the host since the probe was made.

    Args:
        cgroups: Root of the control groups' file system.
        proc: Root of the file system that tells this process's own group, and the host's counters.
    """

    def __init__(self, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> None:
        self._cgroups = cgroups
        self._proc = proc
        self._oom_kills = _oom_kills(cgroups, proc)
        self._swapped_in_bytes = _swapped_in_bytes()

    def read(self) -> HostFacts:
        """Facts about this process and its host; what the host does not say is None. Takes about 1 ms."""
        process = psutil.Process()
        memory, swap = psutil.virtual_memory(), _try(psutil.swap_memory)
        oom_kills, swapped_in = _oom_kills(self._cgroups, self._proc), _swapped_in_bytes()
        return HostFacts(
            rss_bytes=process.memory_info().rss,
            process_swap_bytes=_swap_bytes(process),
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            swap_total_bytes=swap.total if swap else None,
            swap_used_bytes=swap.used if swap else None,
            swapped_in_bytes=_since(swapped_in, self._swapped_in_bytes),
            memory_limit_bytes=_memory_limit_bytes(self._cgroups, self._proc),
            oom_kills=_since(oom_kills, self._oom_kills),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            load_1min=os.getloadavg()[0],
        )


def look_at(pid: int, *, rank: int = -1, started: float | None = None) -> ProcessFacts:
    """A process of this host seen from outside.

    Args:
        pid: Process id.
        rank: Its global rank; -1 if it is none.
        started: When it was started (``psutil.Process.create_time()``), so that another process that has been given
            the same id is not taken for it.
    """
    try:
        process = psutil.Process(pid)
        if started is not None and abs(process.create_time() - started) > 1:
            return ProcessFacts(pid=pid, rank=rank, state="gone")
        with process.oneshot():
            times = _try(process.cpu_times)
            memory = _try(process.memory_info)
            return ProcessFacts(
                pid=pid,
                rank=rank,
                state=str(process.status()),
                wait_channel=_wait_channel(pid),
                cpu_s=round(times.user + times.system, 2) if times else None,
                rss_bytes=memory.rss if memory else None,
                swap_bytes=_swap_bytes(process),
            )
    except psutil.NoSuchProcess:
        return ProcessFacts(pid=pid, rank=rank, state="gone")


def child_processes(*, besides: Iterable[int]) -> list[int]:
    """Process ids of this process's children that multiprocessing made (loader workers), ascending.

    Args:
        besides: Process ids to leave out: ranks that this process launched.
    """
    own = psutil.Process()
    with suppress(psutil.Error):
        command = own.cmdline()
        children = [child for child in own.children() if child.pid not in set(besides)]
        return sorted(child.pid for child in children if _is_worker(_try(child.cmdline) or [], command))
    return []


def _is_worker(command: list[str], parent: list[str]) -> bool:
    """Forked, or spawned; multiprocessing's resource tracker and a user's subprocesses run commands of their own."""
    return command == parent or "--multiprocessing-fork" in command


def find_ranks(master_port: str) -> dict[int, int]:
    """Ranks of a job on this host by their environment, for those that have not said anything yet: pid by local rank.

    Args:
        master_port: ``MASTER_PORT`` of the job.
    """
    found: dict[int, int] = {}
    for process in psutil.process_iter():
        environment = _try(process.environ)
        if not environment or environment.get("MASTER_PORT") != master_port:
            continue
        local_rank = environment.get("LOCAL_RANK", "")
        if local_rank.isdecimal():
            # A rank's children inherit its environment; the rank itself is the oldest, and so comes first.
            found.setdefault(int(local_rank), process.pid)
    return found


def filesystem_of(path: str) -> str:
    """Type of the file system below a path (``"nfs4"``), from the table of mounts: the path itself is not touched."""
    path = os.path.abspath(path)
    # Of two mounts on one place (autofs, and what it mounted) the later is seen.
    mounts = reversed(psutil.disk_partitions(all=True))
    below = [part for part in mounts if _is_below(path, part.mountpoint)]
    return str(max(below, key=lambda part: len(part.mountpoint)).fstype) if below else ""


def _is_below(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def _wait_channel(pid: int) -> str:
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text()
        return "" if name == "0" else name
    return ""


def _swap_bytes(process: psutil.Process) -> int | None:
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmSwap:"):
                return int(line.split()[1]) * 1024
    return None


def _swapped_in_bytes() -> int | None:
    swap = _try(psutil.swap_memory)
    return swap.sin if swap else None


def _oom_kills(cgroups: Path, proc: Path) -> int | None:
    """The kernel's counter of processes it ended for want of memory, of the control group or else of the host."""
    for file in (*_own_cgroup_files(cgroups, proc, "memory.events"), proc / "vmstat"):
        with suppress(OSError):
            for line in file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return None


def _memory_limit_bytes(cgroups: Path, proc: Path) -> int | None:
    limits = []
    for name in ("memory.max", "memory.limit_in_bytes"):
        for file in _own_cgroup_files(cgroups, proc, name):
            with suppress(OSError, ValueError):
                limits.append(int(file.read_text()))
    return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)


def _own_cgroup_files(cgroups: Path, proc: Path, name: str) -> list[Path]:
    """A control file in this process's own group and in each group above it, cgroup v2 and v1, the nearest first."""
    files = []
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = cgroups / "memory" if "memory" in controllers.split(",") else cgroups
            if controllers and root == cgroups:
                continue
            own = root / path.lstrip("/")
            files += [folder / name for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return files


def _since(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _try(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (psutil.Error, OSError, RuntimeError):
        return None
