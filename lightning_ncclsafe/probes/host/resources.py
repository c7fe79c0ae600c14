"""Memory, swap, cores and processes of this host, from psutil, /proc and the control group."""

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from lightning_ncclsafe.facts import GONE, HostFacts, ProcessFacts
from lightning_ncclsafe.probes.absent import grown, line_after, or_none
from lightning_ncclsafe.probes.host.cgroups import ControlGroups
from lightning_ncclsafe.probes.process.main_thread import stat_fields, wait_channel

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
# Of /proc/PID/stat after the name: the last of all.
_EXIT_CODE_FIELD = 49


class HostProbe:
    """Facts about this process and its host; counters start when the probe is made."""

    def __init__(self, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> None:
        self._groups = ControlGroups(cgroups, proc)
        self._proc = proc
        self._oom_kills = _oom_kills(self._groups, proc)
        self._swapped_in_bytes = or_none(lambda: psutil.swap_memory().sin)

    def read(self) -> HostFacts:
        """The present facts; what the host does not report is None. Takes about 1 ms."""
        rss_bytes, swap_bytes = own_memory()
        return replace(
            host_facts(),
            rss_bytes=rss_bytes,
            process_swap_bytes=swap_bytes,
            swapped_in_bytes=grown(or_none(lambda: psutil.swap_memory().sin), self._swapped_in_bytes),
            memory_limit_bytes=self._groups.hard_memory_limit_bytes(),
            oom_kills=grown(_oom_kills(self._groups, self._proc), self._oom_kills),
        )


def host_facts(pid: int = 0) -> HostFacts:
    """Memory, swap and load of this host, and the number of cores that a process may use, by default this one."""
    memory, swap = or_none(psutil.virtual_memory), or_none(psutil.swap_memory)
    has_affinity = hasattr(os, "sched_getaffinity")
    return HostFacts(
        memory_total_bytes=memory.total if memory else None,
        memory_available_bytes=memory.available if memory else None,
        swap_total_bytes=swap.total if swap else None,
        swap_used_bytes=swap.used if swap else None,
        cores=or_none(lambda: len(os.sched_getaffinity(pid))) if has_affinity else os.cpu_count(),
        load_1min=os.getloadavg()[0],
    )


def own_memory() -> tuple[int | None, int | None]:
    """Resident memory of this process, and how much of it is swapped out; bytes. Takes about 0.1 ms."""
    process = psutil.Process()
    memory = or_none(process.memory_info)
    return (memory.rss if memory else None), _swap_bytes(process)


def look_at(pid: int, *, rank: int = -1, started: float | None = None) -> ProcessFacts:
    """A process of this host as seen from outside.

    Args:
        rank: Its global rank; -1 if it is none.
        started: When it was started (``psutil.Process.create_time()``), to recognise another process with the same id.
    """
    try:
        process = psutil.Process(pid)
        if started is not None and abs(process.create_time() - started) > 1:
            return ProcessFacts(pid=pid, rank=rank, state=GONE)
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return _ended_process(pid, rank)
            times = or_none(process.cpu_times)
            memory = or_none(process.memory_info)
            return ProcessFacts(
                pid=pid,
                rank=rank,
                state=str(process.status()),
                wait_channel=wait_channel(Path(f"/proc/{pid}")),
                cpu_s=round(times.user + times.system, 2) if times else None,
                rss_bytes=memory.rss if memory else None,
                swap_bytes=_swap_bytes(process),
            )
    except psutil.NoSuchProcess:
        return ProcessFacts(pid=pid, rank=rank, state=GONE)


def _ended_process(pid: int, rank: int) -> ProcessFacts:
    """A process that has ended, and that its parent has not waited for yet."""
    ended_by, exit_code = how_ended(_exit_code(pid))
    return ProcessFacts(pid=pid, rank=rank, state="zombie", ended_by=ended_by, exit_code=exit_code)


def how_ended(code: int | None) -> tuple[str, int | None]:
    """The signal that ended a process, or the code that it exited with, by an exit code that is negative for a signal.

    If there is no such code, neither is known.
    """
    return (signal_name(-code), None) if code is not None and code < 0 else ("", code)


def signal_name(number: int) -> str:
    """``"SIGKILL"``; ``"signal 50"`` for one that has no name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _exit_code(pid: int) -> int | None:
    """The exit code of a process that has ended, negative for a signal; None if the kernel does not show it."""
    with suppress(OSError, ValueError, IndexError):
        # For other users, it shows 0.
        if Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
            return os.waitstatus_to_exitcode(int(stat_fields(Path(f"/proc/{pid}"))[_EXIT_CODE_FIELD]))
    return None


def child_processes(*, besides: Iterable[int], of: int | None = None) -> list[int]:
    """Process ids of the children of a process that multiprocessing made (loader workers), ascending.

    Args:
        besides: Process ids to leave out: ranks that the process launched.
        of: The process; None for this one.
    """
    with suppress(psutil.Error):
        own = psutil.Process(of)
        command = own.cmdline()
        children = [child for child in own.children() if child.pid not in set(besides)]
        commands = [(child.pid, or_none(child.cmdline) or []) for child in children]
        # A forked child has its parent's command, and a spawned one this option; other children run other commands.
        return sorted(pid for pid, its in commands if its == command or "--multiprocessing-fork" in its)
    return []


def find_ranks(master_port: str, ranks_here: range, environ: Mapping[str, str] = os.environ) -> dict[int, int]:
    """Ranks of a job on this host, found by their environment before they publish anything: pid by rank.

    Args:
        ranks_here: The ranks of this host by local rank, if its ranks are consecutive, as all launchers but SLURM
            number them.
        environ: The environment of this process, for SLURM, under which all ranks know at first only their step.
    """
    step = _slurm_step(environ)
    found: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        environment = or_none(process.environ) or {}
        is_here = environment.get("MASTER_PORT") == master_port or (step and _slurm_step(environment) == step)
        local_rank = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", ""))
        if is_here and local_rank.isdecimal() and int(local_rank) < len(ranks_here):
            # Other launchers below SLURM number their ranks themselves, and SLURM has numbered the launchers.
            is_by_slurm = "LOCAL_RANK" not in environ and "LOCAL_RANK" not in environment
            by_slurm = environment.get("SLURM_PROCID", "") if is_by_slurm else ""
            rank = int(by_slurm) if by_slurm.isdecimal() else ranks_here[int(local_rank)]
            found.setdefault(rank, []).append(process)
    return {rank: _rank_among(processes).pid for rank, processes in found.items()}


def _slurm_step(environment: Mapping[str, str]) -> tuple[str, ...]:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    return tuple(environment[name] for name in names) if all(name in environment for name in names) else ()


def _rank_among(processes: list[psutil.Process]) -> psutil.Process:
    """The rank itself: wrappers (a shell, ``timeout``) are other programs, and children are younger."""
    own = or_none(psutil.Process().exe)
    return next((process for process in processes if own and or_none(process.exe) == own), processes[0])


def filesystem_of(path: str) -> str:
    """Type of the file system of a path (``"nfs4"``), by the table of mounts; empty for a URL. Accesses nothing."""
    if "://" in path:  # a bucket, which fsspec reads and writes
        return ""
    path = os.path.abspath(path)
    # Of two mounts on one place (autofs, and what it mounted), the later one is visible.
    mounts = reversed(psutil.disk_partitions(all=True))
    below = [part for part in mounts if f"{path}/".startswith(f"{part.mountpoint.rstrip('/')}/")]
    return str(max(below, key=lambda part: len(part.mountpoint)).fstype) if below else ""


def _swap_bytes(process: psutil.Process) -> int | None:
    return or_none(lambda: int(line_after(Path(f"/proc/{process.pid}/status"), "VmSwap:").split()[0]) * 1024)


def _oom_kills(groups: ControlGroups, proc: Path) -> int | None:
    """The kernel's counter of OOM kills, of the control group or else of the host."""
    counters = (line_after(file, "oom_kill ") for file in (*groups.memory_files("memory.events"), proc / "vmstat"))
    return next((int(kills) for kills in counters if kills), None)
