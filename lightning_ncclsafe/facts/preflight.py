"""What one rank finds on its host before training starts, and what it may use of it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one rank may use of its host. None, or empty, means that this host does not report it.

    Attributes:
        machine: Identifies this host: its boot id, or its name; equal on ranks that share a host.
        cpus: Numbers of the cores that this process may run on, ascending.
        quota_cores: CPU time that the control groups allow, in units of cores: the least of the process's own
            group and of all above it; cgroup v1 or v2.
        quota_group: Path of the control group that sets it: ranks in it share it.
        quotas: Each such quota, of the own group and of those above it, by path of the group: a wider one above may be
            shared by more ranks, and so leave less for each.
        memory_limit_bytes: Memory limit of the control group, the own one or one above it, with the least left.
        memory_used_bytes: Its use, without what the kernel can reclaim (inactive files).
        memory_group: Path of that group: ranks in it share it.
        memory_left_bytes: Memory left in each group with a limit, the own one and those above, by path of the group.
        memory_total_bytes: Memory of the host.
        memory_available_bytes: Memory of the host that is available without swapping.
        process_limit_bytes: Bytes that this process may still allocate under ``RLIMIT_AS`` or ``RLIMIT_DATA``.
        shm_total_bytes: Size of /dev/shm, in which workers pass batches.
        shm_free_bytes: Its free space.
        open_files_left: Files that this process, and each process that it forks, may still open.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapFacts:
    """Swap and memory pressure of the host. None means that this host does not report it.

    Attributes:
        total_bytes: Swap space.
        used_bytes: Swap space in use.
        swapped_out_bytes: Written to swap while the check ran.
        swapped_in_bytes: Read back while the check ran.
        devices: Partitions and files with swap space, with the type of a file's file system
            (``"/swapfile on nfs4"``) or of the device.
        on_network: Those that are on a network.
        memory_stalled: Share of the check's time in which all tasks waited for memory (PSI, ``full``), 0 to 1.
        io_stalled: The same for storage.
        cpu_waited: Share of the time in which some task waited for a core (PSI, ``some``).
    """

    total_bytes: int | None = None
    used_bytes: int | None = None
    swapped_out_bytes: int | None = None
    swapped_in_bytes: int | None = None
    devices: tuple[str, ...] = ()
    on_network: tuple[str, ...] = ()
    memory_stalled: float | None = None
    io_stalled: float | None = None
    cpu_waited: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The GPU that a rank uses, as NVML reports it. None means that NVML does not report it.

    Attributes:
        index: Its index for NVML.
        name: Its model.
        uuid: Its UUID; two ranks with the same one share the GPU.
        total_bytes: Its memory.
        free_bytes: Its free memory.
        foreign_processes: Processes on it besides this one and the ranks that it knows, ``"pid 4711 (python), 12.3
            GB"``.
        ecc_errors: Uncorrected memory errors since the driver was loaded.
        pending_repair: Whether memory rows wait to be remapped, or the last remapping failed.
        throttled_by: What reduces its clocks besides power saving: ``"thermal slowdown"``, ``"power brake"``.
        recovery_action: What NVML recommends: ``"reset"``, ``"drain"``, ``"reboot"``; empty for nothing.
        xids: Xid errors in the kernel's log of this boot, newest last, if it can be read: ``"79 (fallen off the
            bus)"``.
        driver: Version of the driver.
        cuda: Version of CUDA that the driver supports.
    """

    index: int
    name: str = ""
    uuid: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    foreign_processes: tuple[str, ...] = ()
    ecc_errors: int | None = None
    pending_repair: bool | None = None
    throttled_by: tuple[str, ...] = ()
    recovery_action: str = ""
    xids: tuple[str, ...] = ()
    driver: str = ""
    cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """How the back ends would reach other hosts.

    Attributes:
        interfaces: Interfaces that are up, with their speed, without loopback: ``"eth0 10000 Mbit/s 10.0.0.7"``.
        default_interface: The interface that NCCL's and gloo's sockets would use, by ``NCCL_SOCKET_IFNAME`` or
            ``GLOO_SOCKET_IFNAME`` or else by their own order; empty if there is none.
        chosen_by: Why this one: the name of the variable, or ``"route to MASTER_ADDR"``, ``"first that is up"``.
        misnamed: Those of these variables that name an interface which this host lacks: ``"GLOO_SOCKET_IFNAME=eth9"``.
        infiniband: InfiniBand and RoCE ports, ``"mlx5_0:1 ACTIVE 400 Gb/sec"``.
        infiniband_active: How many of them are active.
        infiniband_off: Why NCCL would not use them although they exist: ``"NCCL_IB_DISABLE=1"``, ``"libibverbs.so.1
            cannot be loaded"``; empty if nothing prevents it.
    """

    interfaces: tuple[str, ...] = ()
    default_interface: str = ""
    chosen_by: str = ""
    misnamed: tuple[str, ...] = ()
    infiniband: tuple[str, ...] = ()
    infiniband_active: int = 0
    infiniband_off: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """A directory that the run writes to or reads from, as a trial measured it. None means: not measured.

    Attributes:
        role: ``"logs"``, ``"checkpoints"`` or ``"data"``.
        path: The directory.
        filesystem: Type of the file system below it (``"ext4"``, ``"nfs4"``).
        append_s: Median time of one append of 4 KiB, seconds.
        append_worst_s: The longest one, seconds.
        fsync_s: Median time of one fsync, seconds.
        read_s: Median time to open one of its files and read 4 KiB at a random place, seconds.
        free_bytes: Free space for this user.
        free_inodes: How many files can be created.
        problem: Why it cannot be used, in words: ``"Permission denied"``, ``"no answer within 2 s"``.
    """

    role: str
    path: str
    filesystem: str = ""
    append_s: float | None = None
    append_worst_s: float | None = None
    fsync_s: float | None = None
    read_s: float | None = None
    free_bytes: int | None = None
    free_inodes: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """What the run will require of this rank's host. None means: not known in advance.

    Attributes:
        loader_workers: Worker processes of all of this rank's loaders that live at the same time.
        batches_in_flight: Workers times prefetch factor, summed over these loaders.
        batch_bytes: Size of one batch.
        omp_threads: Threads that torch uses for one operation (``torch.get_num_threads()``).
        parameter_bytes: Size of the model's parameters and buffers.
        gradient_bytes: Size of the parameters that are trained.
        replica_bytes: GPU memory for the model, its gradients, DDP's buckets and the optimizer's state.
    """

    loader_workers: int | None = None
    batches_in_flight: int | None = None
    batch_bytes: int | None = None
    omp_threads: int | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    replica_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFacts:
    """Everything that one rank has found, for comparison with the others.

    Attributes:
        capacity: What it may use of its host.
        swap: Swap and pressure.
        gpu: Its GPU; None if it has none.
        network: How other hosts are reached.
        directories: The directories that it writes to and reads from.
        load: What the run will require.
        open_files_limit: Soft limit of open files.
        open_files: How many are open.
        clock_offset_s: How far this host's clock is ahead of rank 0's, seconds.
        clock_error_s: The possible error of this, seconds.
        versions: Of torch, CUDA, NCCL, Lightning, Python, the driver, …: ``{"torch": "2.13.0"}``.
        settings: Environment variables that NCCL, gloo and torch.distributed read.
        is_cuda: Whether the run uses GPUs.
        took_s: How long all of this took, seconds.
        missing: What could not be determined, one sentence each.
    """

    capacity: Capacity = field(default_factory=Capacity)
    swap: SwapFacts = field(default_factory=SwapFacts)
    gpu: GpuFacts | None = None
    network: NetworkFacts = field(default_factory=NetworkFacts)
    directories: tuple[DirectoryFacts, ...] = ()
    load: LoadFacts = field(default_factory=LoadFacts)
    open_files_limit: int | None = None
    open_files: int | None = None
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    is_cuda: bool = False
    took_s: float = 0.0
    missing: tuple[str, ...] = ()
