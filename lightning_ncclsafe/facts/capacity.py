"""What a host lets one rank use: cores, memory, shared memory."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one rank may use of its host. None, or empty, means that this host does not say.

    Attributes:
        machine: What tells this host from others: its boot id, or its name; ranks that have it in common share a host.
        cpus: Numbers of the cores that this process may run on, ascending.
        quota_cores: Cores' worth of processor time that the control groups allow: the least of the process's own
            group and of all above it; cgroup v1 or v2.
        quota_group: Path of the control group that sets it: ranks in it share it.
        quotas: Each such quota, of the own group and of those above it, by path of the group: a wider one above may be
            shared by more ranks, and so leave less for each.
        memory_limit_bytes: Memory limit of the control group, the own one or one above it, with the least left.
        memory_used_bytes: What that group uses, without what the kernel can take back (inactive files).
        memory_group: Path of that group: ranks in it share it.
        memory_left_bytes: What each group with a limit, the own one and those above it, leaves: by path of the group.
        memory_total_bytes: Memory of the host.
        memory_available_bytes: Memory of the host that can be had without swapping.
        process_limit_bytes: What this process may still allocate under ``RLIMIT_AS`` or ``RLIMIT_DATA``.
        shm_total_bytes: Size of /dev/shm, through which workers hand their batches over.
        shm_free_bytes: What is free of it.
        open_files_left: Files that this process may still open, and each process that it forks.
        slurm_cpus_per_task: ``SLURM_CPUS_PER_TASK``: explains a mismatch with ``cpus``, and decides nothing.
    """

    machine: str = ""
    cpus: tuple[int, ...] = ()
    quota_cores: float | None = None
    quota_group: str = ""
    quotas: dict[str, float] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_group: str = ""
    memory_left_bytes: dict[str, int] = field(default_factory=dict)
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    process_limit_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    open_files_left: int | None = None
    slurm_cpus_per_task: int | None = None
