"""A rank's resources, and what may delay it besides its code: memory, waits for a core, pressure, GPU and network.

None, or empty, means that this host does not report it.
"""

from dataclasses import dataclass, field

from lightning_ncclsafe.facts.frames import Frame
from lightning_ncclsafe.facts.preflight import GpuFacts

COLLECTOR = "<garbage collector>"
"""File of the innermost frame of a stack whose thread is in Python's garbage collector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Memory, swap and cores of a rank's process and host. None means that this host does not report it.

    Attributes:
        rss_bytes: Resident memory of the rank's process.
        process_swap_bytes: How much of the process is swapped out.
        memory_growth_bytes_per_s: How fast its resident memory grew, in the last seconds of its start-up.
        swap_growth_bytes_per_s: How fast its swapped-out memory grew in the same time.
        memory_total_bytes: Memory of the host.
        memory_available_bytes: Memory of the host that is available without swapping.
        swap_total_bytes: Swap space of the host.
        swap_used_bytes: Swap space in use on the host.
        swapped_in_bytes: Bytes that the host has read back from swap since the guard started.
        memory_limit_bytes: Memory limit of the process's own control group (cgroup v1 or v2).
        oom_kills: Processes that the kernel's out-of-memory killer has ended since the guard started.
        cores: Cores that this process may run on.
        load_1min: Load average of the last minute.
    """

    rss_bytes: int | None = None
    process_swap_bytes: int | None = None
    memory_growth_bytes_per_s: int | None = None
    swap_growth_bytes_per_s: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    swapped_in_bytes: int | None = None
    memory_limit_bytes: int | None = None
    oom_kills: int | None = None
    cores: int | None = None
    load_1min: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MainThreadFacts:
    """A rank's main thread over the last seconds, by the kernel's counters.

    Attributes:
        over_s: The time that the counters cover, seconds.
        state: ``"running"`` (or waiting for a core), ``"sleeping"``, ``"disk-sleep"``, … now.
        wait_channel: Kernel function it sleeps in now; empty where unreadable.
        looks: How often its state was sampled in this time.
        blocked_looks: How many of the samples found it in uninterruptible sleep.
        running_looks: How many of the samples found it runnable.
        ran_s: Processor time, seconds.
        queued_s: Seconds in the run queue, waiting for a core.
        preempted: Involuntary context switches.
        major_faults: Page faults that had to wait for storage or swap.
    """

    over_s: float
    state: str = ""
    wait_channel: str = ""
    looks: int = 0
    blocked_looks: int = 0
    running_looks: int = 0
    ran_s: float | None = None
    queued_s: float | None = None
    preempted: int | None = None
    major_faults: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureFacts:
    """How much a host and its control groups have delayed processes over the last seconds.

    Attributes:
        over_s: The time that the values cover, seconds.
        throttled_s: Seconds for which the quotas of the rank's control groups kept its processes waiting, summed over
            cores.
        periods: Periods of the quota (mostly 100 ms) in this time.
        throttled_periods: Periods in which the quota was used up early.
        cpu_waited: Share of the time in which some task of the host waited for a core (PSI, ``some``), 0 to 1.
        memory_stalled: The same in which all tasks waited for memory (PSI, ``full``).
        io_stalled: The same for storage.
    """

    over_s: float
    throttled_s: float | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    cpu_waited: float | None = None
    memory_stalled: float | None = None
    io_stalled: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageFacts:
    """The time that Python's garbage collector took from a rank: full collections (the oldest generation) only.

    Attributes:
        running_s: Seconds since the present collection began; 0 if there is none.
        longest_s: The longest collection of the last minute, seconds.
        ended_ago_s: Seconds since the longest one ended.
        total_s: Their sum in the last minute, seconds.
        count: Their number in the last minute.
        blocks: Blocks of memory in use by Python's objects: about as many as there are objects.
    """

    running_s: float = 0.0
    longest_s: float = 0.0
    ended_ago_s: float = 0.0
    total_s: float = 0.0
    count: int = 0
    blocks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedProcess:
    """A child process of a rank, mostly a loader's worker, that was killed or failed.

    Attributes:
        pid: Process id.
        signal: The signal that killed it, ``"SIGKILL"``; empty if it exited by itself.
        exit_code: Its exit code, if it exited by itself.
        ago_s: Seconds since it ended; None if its end was not observed and its parent has not reaped it.
        is_replaced: Whether its parent has reaped it; a process pool has then started another.
        raised: The exception that ended it, ``"ValueError: …"``; only of a child that ``multiprocessing`` has forked.
        stack: Where that was raised, or where the thread that a fatal signal struck was, outermost frame first; only of
            a forked child.
    """

    pid: int
    signal: str = ""
    exit_code: int | None = None
    ago_s: float | None = None
    is_replaced: bool = False
    raised: str = ""
    stack: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStateFacts:
    """A rank's GPU at the moment of an incident.

    Attributes:
        gpu: NVML's values; None if NVML does not answer.
        utilization: Share of the last moments in which a kernel ran on it, 0 to 1.
        power_w: Its power draw, watts.
        no_answer_s: Seconds for which NVML has not answered; 0 if it has.
    """

    gpu: GpuFacts | None = None
    utilization: float | None = None
    power_w: float | None = None
    no_answer_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """The network interface that this rank's back end uses.

    Attributes:
        backend: ``"nccl"`` or ``"gloo"``.
        name: Name of the interface; empty if there is none.
        address: Its address.
        network: The network that this address is in, ``"10.0.0.0/24"``.
        chosen_by: Why this one: ``"NCCL_SOCKET_IFNAME=eth0"``, ``"first that is up"``.
        is_loopback: Whether it reaches only this host.
        others: The host's other interfaces that are up, with their addresses, ``"eth0 10.0.0.7"``.
    """

    backend: str
    name: str = ""
    address: str = ""
    network: str = ""
    chosen_by: str = ""
    is_loopback: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedAddress:
    """A host whose ranks have answered, tried at the address that its back end uses, which may be in another network.

    Attributes:
        host: Its name.
        address: The address of the interface towards other hosts.
        answers: Whether it answered there, to accept a connection or to refuse it; None if unknown.
        seen_from: Name of the host that tried.
        tried: The outcome, in words.
    """

    host: str
    address: str
    answers: bool | None = None
    seen_from: str = ""
    tried: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """All of these facts about one rank.

    Attributes:
        main_thread: Its main thread; None until it has been observed for some time.
        asleep_s: For how many seconds all of its threads, without the guard's, have been asleep, waiting for one
            another; 0 at the first look that finds them so; None if one runs, has run since, or may wait for something
            else.
        pressure: Its host and control groups; None likewise.
        garbage: Python's garbage collector.
        ended: Child processes that were killed or failed recently, or that have not been reaped.
        done: Process ids of the last child processes that are known to have exited with status 0.
        shm_total_bytes: Size of /dev/shm, in which workers pass batches.
        shm_free_bytes: Its free space.
        gpu: Its GPU; None if it uses none.
        interface: The interface towards other hosts; None if unknown.
        name_servers: Addresses of name servers that have not answered this process yet.
        settings: Environment variables that NCCL, gloo and torch.distributed read.
    """

    main_thread: MainThreadFacts | None = None
    asleep_s: float | None = None
    pressure: PressureFacts | None = None
    garbage: GarbageFacts = field(default_factory=GarbageFacts)
    ended: tuple[EndedProcess, ...] = ()
    done: tuple[int, ...] = ()
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    gpu: GpuStateFacts | None = None
    interface: InterfaceFacts | None = None
    name_servers: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
