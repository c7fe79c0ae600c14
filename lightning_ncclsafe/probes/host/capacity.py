"""What this process may use of its host: cores, processor time, memory, shared memory."""

import os
from collections.abc import Mapping

import psutil

from lightning_ncclsafe.code.this_host import host_boot_id
from lightning_ncclsafe.facts import Capacity
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.cgroups import ControlGroups


def capacity(
    groups: ControlGroups | None = None, *, shm: str = "/dev/shm", environment: Mapping[str, str] = os.environ
) -> Capacity:
    """What this rank may use; what the host does not report is None.

    Args:
        groups: This process's control groups; by default they are looked up.
        shm: The folder of shared memory, in which workers pass batches.
    """
    groups = groups or ControlGroups()
    quota, limit = groups.quota(), groups.memory_limit()
    memory = or_none(psutil.virtual_memory)
    shm_total_bytes, shm_free_bytes = shared_memory(shm)
    return Capacity(
        machine=host_boot_id(),
        cpus=cpus(),
        quota_cores=quota.cores if quota else None,
        quota_group=quota.group if quota else "",
        quotas={each.group: each.cores for each in groups.quotas()},
        memory_limit_bytes=limit.limit_bytes if limit else None,
        memory_used_bytes=limit.used_bytes if limit else None,
        memory_group=limit.group if limit else "",
        memory_left_bytes={each.group: each.left_bytes for each in groups.memory_limits()},
        memory_total_bytes=memory.total if memory else None,
        memory_available_bytes=memory.available if memory else None,
        process_limit_bytes=process_limit_bytes(),
        shm_total_bytes=shm_total_bytes,
        shm_free_bytes=shm_free_bytes,
        open_files_left=open_files_left(),
        slurm_cpus_per_task=or_none(lambda: int(environment["SLURM_CPUS_PER_TASK"])),
    )


def shared_memory(folder: str = "/dev/shm") -> tuple[int | None, int | None]:
    """Size and free space of the folder of shared memory, in which workers pass batches, in bytes; None if unknown."""
    found = or_none(lambda: os.statvfs(folder))
    return (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize) if found else (None, None)


def cpus() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on, ascending; all cores if the system has no affinity masks."""
    mask = or_none(lambda: os.sched_getaffinity(0)) or or_none(lambda: psutil.Process().cpu_affinity())
    return tuple(sorted(mask or range(os.cpu_count() or 0)))


def process_limit_bytes() -> int | None:
    """Bytes that this process may still allocate under ``RLIMIT_AS`` and ``RLIMIT_DATA``; None if neither is set."""
    memory = or_none(lambda: psutil.Process().memory_info())
    left = (_left("RLIMIT_AS", getattr(memory, "vms", None)), _left("RLIMIT_DATA", getattr(memory, "data", None)))
    return min((bytes_left for bytes_left in left if bytes_left is not None), default=None)


def open_files_left() -> int | None:
    """How many more files this process may open (``ulimit -n``); None without a limit."""
    return _left("RLIMIT_NOFILE", or_none(lambda: psutil.Process().num_fds()))


def _left(name: str, used: int | None) -> int | None:
    soft = or_none(lambda: _soft_limit(name))
    return None if soft is None or used is None else max(soft - used, 0)


def _soft_limit(name: str) -> int | None:
    import resource  # not on Windows

    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft
