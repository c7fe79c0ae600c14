"""Finds the processes of this host that are ranks, and their jobs, by the environment variables of launchers."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import psutil

from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.probes.absent import file_text, or_none

# Variables with the rank, local rank, number of ranks, and number of ranks of a host. The first ones are those of
# torchrun, DeepSpeed, Accelerate and Kubeflow.
_SCHEMES = (
    (("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",), ("LOCAL_WORLD_SIZE",)),
    (("SLURM_PROCID",), ("SLURM_LOCALID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ()),
    (
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
)
_SLURM = 1
# The variables that Lightning sets for the processes that its rank 0 starts; rank 0 itself has none.
_LIGHTNING = len(_SCHEMES)
# In the command line of a process that Python's multiprocessing starts without a fork.
_SPAWNED = ("--multiprocessing-fork", "from multiprocessing.spawn import", "from multiprocessing.forkserver import")
# Reading a process's memory takes a millisecond, unless the memory is locked.
_MEMORY_S = 1.0
# Of the ranks of one job.
_TOGETHER_S = 60.0
_LIBRARIES = ("/libtorch", "/libc10")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """A Python process of this host.

    Attributes:
        pid: Process id.
        parent: Process id of its parent.
        started: When it was started, seconds since the epoch.
        command: Its command line.
        environment: Its environment at its start; None if it cannot be read.
        has_torch: Whether it has loaded torch.
        has_ended: Whether it has ended, and its parent has not waited for it yet. It has no environment any more.
        is_read: Whether the kernel could read its command line and environment. It cannot while a thread of the process
            has its memory locked, for example while it waits for storage that does not answer.
    """

    pid: int
    parent: int = 0
    started: float = 0.0
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    has_torch: bool = True
    has_ended: bool = False
    is_read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A process that is a rank.

    Attributes:
        pid: Process id.
        rank: Global rank.
        local_rank: Rank on this host.
        world_size: Number of ranks of the job; 0 if unknown.
        local_world_size: Number of ranks of this host; 0 if unknown.
        job: A name of the job that all its ranks share, on all hosts.
        parent: Process id of its parent.
        started: When it was started, seconds since the epoch.
        environment: Its environment at its start.
    """

    pid: int
    rank: int
    local_rank: int = 0
    world_size: int = 0
    local_world_size: int = 0
    job: str = ""
    parent: int = 0
    started: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRanks:
    """The ranks of this host.

    Attributes:
        ranks: Processes that are ranks.
        unplaced: Processes that may be ranks, whose numbers only their stacks can show; by the process that started
            them, or 0 if the user named them.
    """

    ranks: tuple[RankProcess, ...] = ()
    unplaced: Mapping[int, tuple[SeenProcess, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank according to an environment: ``scheme`` is the kind of launcher, ``node`` the number of the host."""

    scheme: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    job: str
    node: int = 0


def python_processes(proc: Path = Path("/proc")) -> list[SeenProcess]:
    """All Python processes of this user; of all users for root."""
    own_id = os.geteuid()
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if own_id in (0, process.uids().real) and process.pid != os.getpid() and _is_python(process):
                found.append(_seen_process(process, proc))
    return [one for one in found if not _inspects(one.command)]


def _seen_process(process: psutil.Process, proc: Path) -> SeenProcess:
    seen = SeenProcess(pid=process.pid, parent=process.ppid(), started=process.create_time())
    if process.status() == psutil.STATUS_ZOMBIE:
        return replace(seen, has_torch=False, has_ended=True)

    def read() -> SeenProcess:
        maps = file_text(proc / str(process.pid) / "maps")
        return replace(
            seen,
            command=tuple(process.cmdline()),
            environment=or_none(process.environ),
            has_torch=any(library in maps for library in _LIBRARIES),
        )

    try:
        return SideThread("ncclsafe-process").call(read, _MEMORY_S)
    except UnansweredError:
        return replace(seen, is_read=False)


def _inspects(command: Sequence[str]) -> bool:
    """Whether it is this very command, to which srun gives the environment of a rank."""
    words = [os.path.basename(word).replace("lightning_ncclsafe", "ncclsafe") for word in command]
    return ("ncclsafe", "inspect") in pairwise(words)


def _is_python(process: psutil.Process) -> bool:
    """Whether it runs Python, by its program file: its name may be changed (setproctitle)."""
    program = or_none(process.exe) or or_none(process.name) or ""
    return "python" in os.path.basename(program).lower()


def find_ranks(processes: Iterable[SeenProcess], pids: Iterable[int] = ()) -> FoundRanks:
    """The ranks among processes.

    Args:
        pids: Take only these processes; by default all ranks.
    """
    by_pid = {process.pid: process for process in processes if not process.has_ended}
    places = {pid: place for pid, process in by_pid.items() if (place := _place(process.environment or {}))}
    places = _numbered(places | _first_ranks(by_pid, places))
    chosen = {*pids}
    ranks = [pid for pid in places if not _is_launcher(pid, by_pid, places) and not _inherits(pid, by_pid, places)]
    if chosen:
        ranks = [pid for pid in places if pid in chosen]
    rest = (pid for pid in by_pid if (pid in chosen if chosen else _may_be_rank(pid, by_pid, places)))
    unplaced: dict[int, list[SeenProcess]] = defaultdict(list)
    for pid in rest:
        if pid not in ranks:
            # Processes that the user names belong together, whatever started them.
            unplaced[0 if chosen else by_pid[pid].parent].append(by_pid[pid])
    found = _youngest(_rank(by_pid[pid], places[pid]) for pid in ranks)
    return FoundRanks(
        ranks=tuple(_with_size_of_host(found)), unplaced={parent: tuple(group) for parent, group in unplaced.items()}
    )


def ended_beside(ranks: Sequence[RankProcess], processes: Iterable[SeenProcess]) -> list[SeenProcess]:
    """Processes that have ended and were started together with the ranks of a job, so that they may be ranks of it."""
    parents = {one.parent for one in ranks}
    since = min(one.started for one in ranks) - _TOGETHER_S
    return [one for one in processes if one.has_ended and one.parent in parents and one.started >= since]


def _rank(process: SeenProcess, place: _Place) -> RankProcess:
    return RankProcess(
        pid=process.pid,
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        job=place.job,
        parent=process.parent,
        started=process.started,
        environment=dict(process.environment or {}),
    )


def _youngest(ranks: Iterable[RankProcess]) -> list[RankProcess]:
    """The youngest process of each rank: older ones are left over from an earlier start."""
    by_rank = {(one.job, one.rank): one for one in sorted(ranks, key=lambda one: one.started)}
    return sorted(by_rank.values(), key=lambda one: (one.job, one.rank))


def _with_size_of_host(ranks: list[RankProcess]) -> Iterator[RankProcess]:
    """Fills in how many ranks a host has, if unknown."""
    sizes = _sizes_of_host(ranks)
    for one in ranks:
        size = one.local_world_size or sizes[one.job]
        yield replace(one, local_world_size=size, world_size=max(one.world_size, one.rank + 1))


def _sizes_of_host(ranks: Iterable[RankProcess | _Place]) -> dict[str, int]:
    """How many ranks a host has of each job, by the highest local rank."""
    sizes: dict[str, int] = defaultdict(int)
    for one in ranks:
        sizes[one.job] = max(sizes[one.job], one.local_rank + 1)
    return sizes


def _place(environment: Mapping[str, str]) -> _Place | None:
    for scheme, (rank, local_rank, world_size, local_size) in enumerate(_SCHEMES):
        number, size = _number(environment, rank), _number(environment, world_size)
        if number is not None and size is not None and number < size and (size > 1 or scheme != _SLURM):
            job = _job(environment, scheme)
            local = _number(environment, local_rank)
            return _Place(scheme, number, local or 0, size, _number(environment, local_size) or 0, job)
    local, size = _number(environment, ("LOCAL_RANK",)), _number(environment, ("WORLD_SIZE",))
    if local is None or size is None or "MASTER_PORT" not in environment:
        return None
    node = _number(environment, ("NODE_RANK", "GROUP_RANK")) or 0
    return _Place(_LIGHTNING, local, local, size, 0, _job(environment, _LIGHTNING), node)


def _numbered(places: Mapping[int, _Place]) -> dict[int, _Place]:
    """Fills in the ranks that Lightning started: equally many on each host, with variables for host and local rank."""
    sizes = _sizes_of_host(places.values())
    return {
        pid: replace(place, rank=place.node * sizes[place.job] + place.local_rank)
        if place.scheme == _LIGHTNING
        else place
        for pid, place in places.items()
    }


def _job(environment: Mapping[str, str], scheme: int) -> str:
    if scheme == _SLURM and "SLURM_JOB_ID" in environment:
        return f"SLURM job {environment['SLURM_JOB_ID']}, step {environment.get('SLURM_STEP_ID', '0')}"
    if "MASTER_PORT" in environment:
        return f"{environment.get('MASTER_ADDR', 'localhost')}:{environment['MASTER_PORT']}"
    return "" if scheme == _LIGHTNING else "this host"


def _number(environment: Mapping[str, str], names: Iterable[str]) -> int | None:
    texts = (environment[name] for name in names if name in environment)
    return next((int(text) for text in texts if text.isascii() and text.isdecimal()), None)


def _first_ranks(by_pid: Mapping[int, SeenProcess], places: Mapping[int, _Place]) -> dict[int, _Place]:
    """The first rank of a host where Lightning started the others: it is their parent, and has no variables."""
    children: dict[int, list[_Place]] = defaultdict(list)
    for pid, place in places.items():
        if place.scheme == _LIGHTNING:
            children[by_pid[pid].parent].append(place)
    found = {}
    for parent, of_parent in children.items():
        if parent in by_pid and parent not in places and all(place.local_rank for place in of_parent):
            found[parent] = replace(of_parent[0], local_rank=0)
    return found


def _is_launcher(pid: int, by_pid: Mapping[int, SeenProcess], places: Mapping[int, _Place]) -> bool:
    """Whether it only starts ranks, although it has a rank's environment, like torchrun's agent in a SLURM step."""
    own, below = places[pid], [other for other, process in by_pid.items() if process.parent == pid and other in places]
    if any(places[other].scheme < own.scheme for other in below):
        return True
    alike = [other for other in below if places[other] == own]
    return bool(alike) and not by_pid[pid].has_torch and any(by_pid[other].has_torch for other in alike)


def _inherits(pid: int, by_pid: Mapping[int, SeenProcess], places: Mapping[int, _Place]) -> bool:
    """Whether it has its environment from a rank that started it, like a loader's worker."""
    parent, passed = by_pid[pid].parent, {pid}
    # If an id is reused while processes are listed, a process may seem to be its own ancestor.
    while parent in by_pid and parent not in passed:
        passed.add(parent)
        above = places.get(parent)
        is_same = above is not None and (above.rank, above.job) == (places[pid].rank, places[pid].job)
        if is_same and not _is_launcher(parent, by_pid, places):
            return True
        parent = by_pid[parent].parent
    return False


def _may_be_rank(pid: int, by_pid: Mapping[int, SeenProcess], places: Mapping[int, _Place]) -> bool:
    """Whether Python's multiprocessing started it from a process that is not a rank."""
    process, parent = by_pid[pid], by_pid.get(by_pid[pid].parent)
    if pid in places or parent is None or parent.pid in places or not process.has_torch:
        return False
    is_spawned = any(mark in part for part in process.command for mark in _SPAWNED)
    is_tracker = any("resource_tracker" in part for part in process.command)
    return not is_tracker and (is_spawned or process.command == parent.command)
