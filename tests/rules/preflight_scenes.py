"""Hosts with one thing wrong, and what has to be told of it; hosts with nothing wrong, up to every threshold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from preflight_builders import GB, checking, directory, having, healthy, setting

from lightning_ncclsafe.facts import JobFacts, PreflightFacts, ProcessFacts
from lightning_ncclsafe.facts.findings import Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING
MIB = 2**20


@dataclass(frozen=True)
class Scene:
    """What ranks find, and all that has to be told, with words that have to be in it."""

    name: str
    job: JobFacts
    rule: str
    ranks: tuple[int, ...]
    says: tuple[str, ...] = ()
    severity: Severity = WARNING


TWO = checking(16)
ONE = checking(8)
ALONE = checking(1)
FIRST, SECOND = tuple(range(8)), tuple(range(8, 16))
ALL = tuple(range(16))


def bound(*masks: tuple[int, ...], **more: Any) -> JobFacts:
    """Ranks of one host with these masks and two workers each."""
    job = having(checking(len(masks)), part="load", loader_workers=2, omp_threads=1)
    job = having(job, part="capacity", cpus=lambda rank: masks[rank], slurm_cpus_per_task=None, quota_cores=None)
    return having(job, part="capacity", **more) if more else job


def named(job: JobFacts, name: Callable[[int], str]) -> JobFacts:
    return replace(job, ranks=tuple(replace(facts, host=name(facts.rank)) for facts in job.ranks))


def on_cpu(job: JobFacts) -> JobFacts:
    """The same without GPUs."""
    return having(job, gpu=None, is_cuda=False)


def loading(job: JobFacts, *only: int, **more: Any) -> JobFacts:
    return having(job, *only, part="load", **more)


def host(job: JobFacts, *only: int, **more: Any) -> JobFacts:
    return having(job, *only, part="capacity", **more)


def swap(job: JobFacts, *only: int, **more: Any) -> JobFacts:
    return having(job, *only, part="swap", **more)


def gpu(job: JobFacts, *only: int, **more: Any) -> JobFacts:
    return having(job, *only, part="gpu", **more)


def network(job: JobFacts, *only: int, **more: Any) -> JobFacts:
    return having(job, *only, part="network", **more)


def interface(text: str) -> tuple[str, ...]:
    return (text,)


def version(job: JobFacts, *only: int, **more: str) -> JobFacts:
    return having(job, *only, versions=healthy(0).versions | more)


WORKERS = (
    Scene(
        "one worker too many on each rank",
        loading(ONE, loader_workers=8, batches_in_flight=16),
        "too-many-workers",
        FIRST,
        (
            "Ranks 0-7 (node-0): 64 loader workers and 8 other threads on 64 cores, 1.1 for each core",
            "there is room for 7 workers per rank",
        ),
    ),
    Scene(
        "three times too many on one host",
        loading(TWO, *SECOND, loader_workers=24),
        "too-many-workers",
        SECOND,
        ("Ranks 8-15 (node-1): 192 loader workers and 8 other threads on 64 cores, 3.1 for each core",),
        ERROR,
    ),
    Scene(
        "a quota that the ranks share",
        loading(host(ONE, quota_cores=16.0), omp_threads=1),
        "too-many-workers",
        FIRST,
        ("32 loader workers and 8 other threads on 16 cores, 2.5 for each core; there is room for 1 worker per rank",),
        ERROR,
    ),
    Scene(
        "a quota of each container on a machine",
        named(loading(host(ONE, quota_cores=4.0), omp_threads=4), lambda rank: f"pod-{rank}"),
        "too-many-workers",
        FIRST,
        ("4 loader workers and 1 other thread on 4 cores, 1.2 for each core",),
    ),
    Scene(
        "half a core",
        loading(host(ALONE, quota_cores=0.5), omp_threads=1),
        "too-many-workers",
        (0,),
        ("on 0.5 cores, 10.0 for each core; there is room for 0 workers",),
        ERROR,
    ),
    Scene(
        "one rank is bound to fewer cores",
        bound(tuple(range(6)), (6, 7)),
        "too-many-workers",
        (1,),
        ("Rank 1 (node-0): 2 loader workers and 1 other thread on 2 cores, 1.5 for each core",),
    ),
    Scene(
        "only one rank has workers",
        loading(loading(ONE, loader_workers=0), 0, loader_workers=57),
        "too-many-workers",
        FIRST,
        ("57 loader workers and 8 other threads on 64 cores",),
    ),
)
MEMORY = (
    Scene(
        "prefetching 1,000 batches, as in Wenet",
        loading(ONE, batches_in_flight=1_000, batch_bytes=GB // 8),
        "memory-short",
        FIRST,
        (
            "Ranks 0-7 (node-0): only 840.0 GB left of the 900.0 GB limit of the control group for 1.0 TB of batches",
            "only 900.0 GB available of 1.0 TB on the host for 1.0 TB of batches in flight",
        ),
    ),
    Scene(
        "next to nothing left",
        host(TWO, *SECOND, memory_available_bytes=49 * GB),
        "memory-short",
        SECOND,
        ("Ranks 8-15 (node-1): only 49.0 GB available of 1.0 TB on the host for 6.4 GB of batches in flight.",),
    ),
    Scene(
        "next to nothing left of the limit, and no loaders",
        loading(host(ALONE, memory_used_bytes=880 * GB), batches_in_flight=None, loader_workers=0),
        "memory-short",
        (0,),
        ("only 20.0 GB left of the 900.0 GB limit of the control group.",),
    ),
    Scene(
        "a limit further up, which more ranks share",
        host(
            ONE,
            memory_left_bytes=lambda rank: {f"/job/{rank}": 2 * GB, "/job": 6 * GB},
            memory_group=lambda rank: f"/job/{rank}",
            memory_limit_bytes=3 * GB,
        ),
        "memory-short",
        FIRST,
        ("Ranks 0-7 (node-0): only 6.0 GB left by the control group /job for 6.4 GB of batches in flight.",),
    ),
    Scene(
        "above its limit already",
        host(ALONE, memory_used_bytes=901 * GB),
        "memory-short",
        (0,),
        ("only 0 bytes left of the 900.0 GB limit",),
    ),
    Scene(
        "replicas of a model on the CPU",
        loading(on_cpu(ONE), replica_bytes=110 * GB),
        "memory-short",
        FIRST,
        ("only 840.0 GB left", "and 856.0 GB for models on the CPU"),
        ERROR,
    ),
    Scene(
        "a limit of the process",
        host(on_cpu(ALONE), process_limit_bytes=11 * GB),
        "memory-short",
        (0,),
        ("the model needs 12.0 GB, ulimit lets the process allocate 11.0 GB",),
        ERROR,
    ),
    Scene(
        "swap in use",
        swap(TWO, 8, used_bytes=12 * GB),
        "swap-in-use",
        SECOND,
        ("Ranks 8-15 (node-1): 12.0 GB of swap in use on a host with 1.0 TB of memory.",),
    ),
    Scene(
        "swapping now",
        swap(ONE, swapped_out_bytes=3 * 10**6, swapped_in_bytes=10**6),
        "swap-in-use",
        FIRST,
        ("3.0 MB swapped out and 1.0 MB read back while the check ran",),
    ),
    Scene(
        "swap over a network",
        swap(TWO, *FIRST, on_network=("/swapfile on nfs4",), used_bytes=GB),
        "swap-on-network",
        FIRST,
        ("swap is on a network (/swapfile on nfs4), 1.0 GB of it in use",),
    ),
    Scene(
        "waiting for memory",
        swap(TWO, *SECOND, memory_stalled=0.12),
        "host-under-pressure",
        SECOND,
        ("all tasks waited for memory 12% of the time.",),
    ),
    Scene("waiting for storage", swap(TWO, 3, io_stalled=0.4), "host-under-pressure", FIRST, ("for storage 40%",)),
    Scene(
        "more in flight than /dev/shm has",
        host(ONE, shm_free_bytes=6 * GB),
        "shm-too-small",
        FIRST,
        ("Ranks 0-7 (node-0): 6.0 GB free in /dev/shm for 64 batches in flight of 8 ranks, 6.4 GB.",),
    ),
    Scene(
        "Docker's default, which is smaller than a batch",
        host(ONE, shm_free_bytes=64 * MIB, shm_total_bytes=64 * MIB),
        "shm-too-small",
        FIRST,
        ("67.1 MB free in /dev/shm (Docker's default of 64 MB) for 64 batches",),
        ERROR,
    ),
    Scene(
        "Docker's default and batches of unknown size",
        loading(host(ALONE, shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB), batch_bytes=None),
        "shm-too-small",
        (0,),
        ("/dev/shm has only 67.1 MB (Docker's default of 64 MB)",),
    ),
    Scene(
        "Docker's default below NCCL",
        loading(host(ONE, shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB), loader_workers=0, batches_in_flight=0),
        "shm-too-small",
        FIRST,
    ),
    Scene(
        "a low limit of open files and many workers",
        loading(having(ALONE, open_files_limit=1_024), loader_workers=8, batches_in_flight=16),
        "too-few-open-files",
        (0,),
        ("1,024 open files are allowed for 8 loader workers and 16 batches in flight",),
    ),
    Scene(
        "more in flight than there may be files",
        loading(having(ALONE, open_files_limit=5_000), batches_in_flight=2_500, batch_bytes=1),
        "too-few-open-files",
        (0,),
    ),
)
GPUS = (
    Scene(
        "one GPU for two ranks",
        gpu(ONE, 3, uuid="GPU-2"),
        "gpu-shared",
        (2, 3),
        ("Ranks 2-3 (node-0): one GPU for 2 ranks (GPU-2)",),
    ),
    Scene(
        "somebody else on it",
        gpu(TWO, 9, foreign_processes=("pid 7 (python), 3 GB", "b", "c", "d")),
        "gpu-shared",
        (9,),
        ("Rank 9 (node-1): other processes on the GPU: pid 7 (python), 3 GB; b; c, and 1 more",),
    ),
    Scene(
        "somebody else beside another rank",
        gpu(
            replace(TWO, ranks=tuple(replace(one, pid=100 + one.rank) for one in TWO.ranks)),
            9,
            foreign_processes=("pid 108 (python), 3 GB", "pid 101 (python)", "pid 10 (python)"),
        ),
        "gpu-shared",
        (9,),
        ("Rank 9 (node-1): other processes on the GPU: pid 101 (python); pid 10 (python)",),
    ),
    Scene(
        "no room for the model",
        loading(gpu(ONE, free_bytes=14 * GB), replica_bytes=15 * GB),
        "gpu-memory-short",
        FIRST,
        ("14.0 GB free on the GPU, 15.0 GB needed for the model and its training state",),
        ERROR,
    ),
    Scene(
        "less room than the others",
        gpu(TWO, 5, free_bytes=60 * GB),
        "gpu-memory-short",
        (5,),
        ("Rank 5 (node-0): 60.0 GB free on the GPU, peers have 79.0 GB.",),
    ),
    Scene(
        "errors of memory", gpu(ONE, 1, ecc_errors=1), "gpu-unhealthy", (1,), ("GPU 1: 1 uncorrected memory error.",)
    ),
    Scene("a repair", gpu(ONE, 1, pending_repair=True), "gpu-unhealthy", (1,), ("is pending or has failed",)),
    Scene(
        "heat",
        gpu(ONE, 1, throttled_by=("thermal slowdown",)),
        "gpu-unhealthy",
        (1,),
        ("held down by thermal slowdown",),
    ),
    Scene("a reset", gpu(ONE, 1, recovery_action="reset"), "gpu-unhealthy", (1,), ("the driver asks for: reset",)),
    Scene(
        "Xid errors",
        gpu(TWO, 1, 14, xids=("1", "31 (page fault)", "48 (double-bit error)", "79 (fallen off the bus)")),
        "gpu-unhealthy",
        (1, 14),
        ("Xid 31 (page fault), 48 (double-bit error), 79 (fallen off the bus)", "rank 14 (node-1): GPU 6"),
    ),
)
AGREEMENT = (
    Scene(
        "another NCCL",
        version(TWO, *SECOND, nccl="2.27.3"),
        "different-versions",
        ALL,
        ("nccl is 2.28.9 on ranks 0-7 but 2.27.3 on ranks 8-15",),
    ),
    Scene("another torch", version(ONE, 3, torch="1.13.1"), "different-versions", (3,), ("1.13.1 on rank 3",), ERROR),
    Scene("NCCL 3", version(ONE, 3, nccl="3.0"), "different-versions", (3,), severity=ERROR),
    Scene("another Python", version(ONE, 3, python="4.0"), "different-versions", (3,), ("python is 3.11.9 on",)),
    Scene("another GPU", gpu(ONE, 3, name="NVIDIA A100"), "different-versions", (3,), ("GPU is NVIDIA H100",)),
    Scene("another driver", gpu(ONE, 3, driver="535"), "different-versions", (3,), ("driver is 570.86.15 on",)),
    Scene(
        "a variable that is not set on one host",
        setting(TWO, *SECOND, NCCL_ALGO="Ring"),
        "different-settings",
        ALL,
        ("NCCL_ALGO is not set on ranks 0-7 but Ring on ranks 8-15",),
    ),
    Scene(
        "an interface of one rank",
        setting(TWO, 9, NCCL_SOCKET_IFNAME="eth1"),
        "different-settings",
        (9,),
        ("Rank 9 (node-1): NCCL_SOCKET_IFNAME is eth0 on ranks 0-8, 10-15 but eth1 on rank 9.",),
    ),
    Scene(
        "two variables on one rank",
        setting(ONE, 1, NCCL_ALGO="Ring", TORCH_NCCL_NAN_CHECK="1"),
        "different-settings",
        (1,),
        ("Rank 1 (node-0): NCCL_ALGO is", "; TORCH_NCCL_NAN_CHECK is not set"),
    ),
    Scene(
        "a timeout that nothing reads",
        setting(ONE, NCCL_TIMEOUT="7200"),
        "ignored-settings",
        FIRST,
        ("Ranks 0-7 (node-0): NCCL_TIMEOUT=7200 is read by neither NCCL nor torch; pass timeout=timedelta(...)",),
    ),
    Scene(
        "an old name",
        setting(ONE, NCCL_ASYNC_ERROR_HANDLING="1"),
        "ignored-settings",
        FIRST,
        ("is deprecated and overruled by its new name, TORCH_NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Scene(
        "the recorder's old name",
        setting(ONE, TORCH_NCCL_TRACE_BUFFER_SIZE="2000"),
        "ignored-settings",
        FIRST,
        ("_FR_",),
    ),
    Scene(
        "the wrong prefix",
        setting(ONE, NCCL_HEARTBEAT_TIMEOUT_SEC="60"),
        "ignored-settings",
        FIRST,
        ("has no effect, because nothing reads it; the name is TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",),
    ),
    Scene(
        "a misspelling", setting(ONE, NCCL_SOCKET_IF_NAME="e"), "ignored-settings", FIRST, ("is NCCL_SOCKET_IFNAME",)
    ),
    Scene("of Lightning 1", setting(ONE, PL_RECONCILE_PROCESS="1"), "ignored-settings", FIRST, ("no longer read",)),
    Scene(
        "no P2P",
        setting(ONE, NCCL_P2P_DISABLE="1"),
        "harmful-settings",
        FIRST,
        ("Ranks 0-7 (node-0): NCCL_P2P_DISABLE=1 sends data between the GPUs of a host through its memory",),
    ),
    Scene("no shared memory", setting(ONE, NCCL_SHM_DISABLE="1"), "harmful-settings", FIRST),
    Scene(
        "no InfiniBand although it is there",
        setting(network(TWO, infiniband_off="NCCL_IB_DISABLE=1"), NCCL_IB_DISABLE="1"),
        "harmful-settings",
        ALL,
        ("NCCL_IB_DISABLE=1 leaves active InfiniBand ports unused",),
    ),
    Scene("blocking kernels", setting(ALONE, CUDA_LAUNCH_BLOCKING="1"), "harmful-settings", (0,)),
    Scene("blocking collectives", setting(ALONE, TORCH_NCCL_BLOCKING_WAIT="1"), "harmful-settings", (0,)),
    Scene("all checks", setting(ALONE, TORCH_DISTRIBUTED_DEBUG="detail"), "harmful-settings", (0,), ("=DETAIL",)),
    Scene("a trace", setting(ALONE, NCCL_DEBUG="trace"), "harmful-settings", (0,), ("NCCL_DEBUG=TRACE",)),
    Scene("sixteen logs", setting(TWO, NCCL_DEBUG="INFO"), "harmful-settings", ALL, ("=INFO on 16 ranks",)),
    Scene(
        "loopback",
        network(setting(TWO, NCCL_SOCKET_IFNAME="lo"), interfaces=(), default_interface="lo"),
        "harmful-settings",
        ALL,
        ("NCCL_SOCKET_IFNAME=lo reaches none of the other hosts of the job",),
    ),
    Scene(
        "too many threads",
        loading(ONE, 2, omp_threads=64),
        "harmful-settings",
        (2,),
        ("Rank 2 (node-0): 64 threads for each operation of torch (OMP_NUM_THREADS) on a share of 8.0 cores",),
    ),
    Scene(
        "cannot use InfiniBand",
        network(TWO, *SECOND, infiniband_off="libibverbs.so.1 cannot be loaded."),
        "socket-fallback",
        SECOND,
        ("Ranks 8-15 (node-1): NCCL would not use 1 active InfiniBand port: libibverbs.so.1 cannot be loaded.",),
    ),
    Scene(
        "a host without InfiniBand",
        network(checking(24), *SECOND, infiniband_active=0, infiniband=()),
        "socket-fallback",
        SECOND,
        ("Ranks 8-15 (node-1): no active InfiniBand ports, other hosts have 1.",),
    ),
    Scene(
        "no interface",
        network(TWO, *SECOND, interfaces=(), default_interface=""),
        "unreachable-interface",
        SECOND,
        ("no interface by which other hosts could be reached",),
    ),
    Scene(
        "an interface that is not there, on a single rank",
        network(on_cpu(ALONE), misnamed=("GLOO_SOCKET_IFNAME=nope",), default_interface=""),
        "unreachable-interface",
        (0,),
        ("Rank 0 (node-0): GLOO_SOCKET_IFNAME=nope fits no interface of the host, which has eth0, eth1.",),
        ERROR,
    ),
    Scene(
        "an interface that is not there on one of two hosts",
        network(TWO, *SECOND, misnamed=("NCCL_SOCKET_IFNAME=nope",), default_interface="", interfaces=()),
        "unreachable-interface",
        SECOND,
        ("Ranks 8-15 (node-1): NCCL_SOCKET_IFNAME=nope fits no interface of the host, which has only loopback.",),
        ERROR,
    ),
    Scene(
        "gloo's interface beside NCCL",
        network(ONE, misnamed=("GLOO_SOCKET_IFNAME=nope",)),
        "unreachable-interface",
        FIRST,
    ),
    Scene(
        "a bridge on both hosts",
        network(TWO, interfaces=interface("docker0 10000 Mbit/s 172.17.0.1"), default_interface="docker0"),
        "unreachable-interface",
        ALL,
        ("2 hosts have the same address 172.17.0.1",),
    ),
    Scene(
        "loopback by itself",
        network(TWO, *SECOND, default_interface="lo", chosen_by="address of the host's name"),
        "unreachable-interface",
        SECOND,
        ("Ranks 8-15 (node-1): the loopback interface would be taken",),
    ),
    Scene(
        "another network",
        network(checking(24), *SECOND, interfaces=interface("eth0 100000 Mbit/s 192.168.0.9")),
        "unreachable-interface",
        SECOND,
        ("10.0.0.0/16 on ranks 0-7, 16-23 but 192.168.0.0/16 on ranks 8-15 (interface eth0)",),
    ),
    Scene(
        "another speed",
        network(checking(24), *SECOND, interfaces=interface("eth0 1000 Mbit/s 10.0.0.9")),
        "unreachable-interface",
        SECOND,
        ("100000 Mbit/s on ranks 0-7, 16-23 but 1000 Mbit/s on ranks 8-15",),
    ),
)
STORAGE = (
    Scene(
        "slow appends",
        directory(ONE, "logs", 0, append_s=0.034, filesystem="nfs4"),
        "slow-directory",
        (0,),
        ("Rank 0 (node-0): the logs at /scratch/logs (nfs4, a network file system): append 34 ms (up to 10 ms is",),
    ),
    Scene("a slow append", directory(ONE, "logs", 0, append_worst_s=0.3), "slow-directory", (0,), ("append 300 ms",)),
    Scene("slow fsync", directory(ONE, "checkpoints", 0, fsync_s=0.8), "slow-directory", (0,), ("fsync 800 ms",)),
    Scene(
        "slow reads on all ranks",
        directory(ONE, "data", read_s=0.06),
        "slow-directory",
        FIRST,
        ("opening and reading 4 KiB 60 ms (up to 50 ms is fine), the slowest of 8 ranks",),
    ),
    Scene(
        "a full disk",
        directory(ALONE, "logs", free_bytes=GB),
        "full-directory",
        (0,),
        ("1.0 GB free for the logs at /scratch/logs (ext4).",),
    ),
    Scene(
        "no room for two checkpoints",
        directory(ONE, "checkpoints", 0, free_bytes=5 * GB),
        "full-directory",
        (0,),
        ("5.0 GB free for the checkpoints", "two checkpoints of the model alone take 6.0 GB"),
    ),
    Scene("no inodes", directory(ALONE, "logs", free_inodes=0), "full-directory", (0,), ("only 0 more files can be",)),
    Scene(
        "not to be written to",
        directory(ONE, "logs", problem="Permission denied."),
        "unusable-directory",
        FIRST,
        ("Ranks 0-7 (node-0): the logs at /scratch/logs (ext4) cannot be used: Permission denied.",),
        ERROR,
    ),
    Scene("not by a rank that writes nothing", directory(ONE, "logs", 3, problem="x"), "unusable-directory", (3,)),
    Scene(
        "a trial that died",
        directory(ALONE, "logs", problem="the trial exited without an answer"),
        "unusable-directory",
        (0,),
    ),
    Scene("a mount that is dead", directory(ALONE, "logs", problem="no answer within 2 s"), "unusable-directory", (0,)),
    Scene("data that is absent", directory(ALONE, "data", problem="not found"), "unusable-directory", (0,)),
)
OTHERS = (
    Scene(
        "a clock that is ahead",
        having(TWO, *SECOND, clock_offset_s=1.2, clock_error_s=0.1),
        "clocks-apart",
        SECOND,
        ("Ranks 8-15 (node-1): the clock is 1.2 s ahead of rank 0's.",),
    ),
    Scene(
        "a clock that is behind", having(TWO, 9, clock_offset_s=-90.0), "clocks-apart", SECOND, ("30 s behind rank",)
    ),
    Scene(
        "fewer cores than asked for",
        host(loading(ALONE, loader_workers=0, omp_threads=4), cpus=(0, 1, 2, 3)),
        "cores-mismatch",
        (0,),
        ("bound to 4 of the 8 cores of SLURM_CPUS_PER_TASK",),
    ),
    Scene(
        "one core each",
        loading(bound((0,), (1,)), loader_workers=0),
        "cores-mismatch",
        (0, 1),
        ("Ranks 0-1 (node-0): bound to one core",),
    ),
    Scene(
        "masks that overlap",
        bound(tuple(range(8)), tuple(range(4, 16)), tuple(range(32, 40))),
        "cores-mismatch",
        (0, 1),
        ("bound to different masks of 8 to 12 cores that overlap",),
    ),
    Scene(
        "no answer",
        checking(16, silent=(3, 9), witnessed=(ProcessFacts(pid=7, rank=3, state="disk-sleep"),)),
        "silent-at-preflight",
        (3, 9),
        ("Rank 3: no answer, 14 of 16 ranks answered, its process is disk-sleep; rank 9: no answer",),
    ),
)
SCENES = (*WORKERS, *MEMORY, *GPUS, *AGREEMENT, *STORAGE, *OTHERS)
# What is wrong there brings another finding with it.
TOGETHER = {"prefetching 1,000 batches, as in Wenet": {"shm-too-small"}}

# A process for each rank; numbers of one host exist on the other as well.
WITH_PIDS = replace(TWO, ranks=tuple(replace(one, pid=100 + one.local_rank) for one in TWO.ranks))
QUIET = {
    "another rank on the GPU": gpu(WITH_PIDS, 9, foreign_processes=("pid 100 (python), 3 GB",)),
    "as many workers and threads as cores": loading(ONE, loader_workers=7),
    "more threads than the share where GPUs compute": loading(loading(ALONE, loader_workers=60), omp_threads=64),
    "threads of the CPU that fit": loading(on_cpu(ONE), loader_workers=7),
    "no workers and a small quota": loading(host(ONE, quota_cores=1.0), loader_workers=0, omp_threads=1),
    "8 ranks bound to 8 cores each": host(
        loading(ONE, loader_workers=7), cpus=lambda rank: tuple(range(8 * rank, 8 * rank + 8))
    ),
    "4 ranks on each of two nodes": host(
        loading(ONE, loader_workers=7), cpus=lambda rank: tuple(range(32 * (rank // 4), 32 * (rank // 4) + 32))
    ),
    "as much in flight as there is memory": loading(
        host(ALONE, memory_available_bytes=100 * GB, memory_used_bytes=800 * GB, shm_free_bytes=100 * GB),
        batch_bytes=100 * GB // 8,
    ),
    "a twentieth left": host(ALONE, memory_available_bytes=50 * GB),
    "a model on the CPU that fits": loading(on_cpu(ALONE), replica_bytes=3 * GB + 800 * GB),
    "1 % of swap": swap(ONE, used_bytes=10 * GB, swapped_in_bytes=10**6),
    "a tenth of the time": swap(ONE, memory_stalled=0.1, io_stalled=0.1),
    "cores that are busy, as in any start": swap(ALONE, cpu_waited=0.9),
    "as much in flight as /dev/shm has": host(ONE, shm_free_bytes=64 * GB // 10),
    "Docker's default and no workers": loading(
        host(ALONE, shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB), loader_workers=0, batches_in_flight=0
    ),
    "a low limit of open files and few workers": having(
        loading(ALONE, loader_workers=7, batches_in_flight=14), open_files_limit=1_024
    ),
    "enough open files for many workers": having(
        loading(ALONE, loader_workers=8, batches_in_flight=16), open_files_limit=4_096
    ),
    "unlimited open files": having(loading(ALONE, loader_workers=8), open_files_limit=-1),
    "just enough room on the GPU": gpu(ONE, free_bytes=15 * GB),
    "a tenth less than the others": gpu(ONE, 5, free_bytes=71 * GB),
    "another version's name is not known": having(ONE, 3, versions={"torch": "2.13.0"}),
    "no versions": having(ONE, 3, versions={}),
    "names of interfaces of each host": setting(TWO, *SECOND, NCCL_SOCKET_IFNAME="ens5", NCCL_IB_HCA="mlx5_1"),
    "one rank's log": setting(TWO, 0, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/tmp/nccl.log"),
    "eight logs": setting(TWO, *FIRST, NCCL_DEBUG="INFO"),
    "variables of the launcher": setting(TWO, 3, SLURM_PROCID="3", RANK="3", TORCHELASTIC_ERROR_FILE="x"),
    "no P2P on one rank's own host": setting(ALONE, NCCL_P2P_DISABLE="1"),
    "P2P not disabled": setting(ONE, NCCL_P2P_DISABLE="0", CUDA_LAUNCH_BLOCKING="", NCCL_SHM_DISABLE="false"),
    "InfiniBand off on one host": setting(network(ONE, infiniband_off="NCCL_IB_DISABLE=1"), NCCL_IB_DISABLE="1"),
    "InfiniBand off where there is none": setting(network(TWO, infiniband_active=0), NCCL_IB_DISABLE="1"),
    "InfiniBand that cannot be used on one host": network(ONE, infiniband_off="x"),
    "/dev/shm of each container on a machine": named(host(ONE, shm_free_bytes=GB), lambda rank: f"pod-{rank}"),
    "a memory limit of each rank": host(
        ONE, memory_group=lambda rank: f"/{rank}", memory_limit_bytes=2 * GB, memory_used_bytes=GB
    ),
    "a memory limit of each container": named(
        host(ONE, memory_limit_bytes=2 * GB, memory_used_bytes=GB), lambda rank: f"pod-{rank}"
    ),
    "loopback on one host": network(setting(ONE, NCCL_SOCKET_IFNAME="lo"), default_interface="lo", interfaces=()),
    "a host without InfiniBand alone": network(ONE, infiniband_active=0, infiniband=(), infiniband_off="x"),
    "NCCL's interface without GPUs": network(on_cpu(ONE), misnamed=("NCCL_SOCKET_IFNAME=nope",)),
    "no interface on one host": network(ONE, 3, default_interface="", interfaces=()),
    "addresses that nobody can read": network(TWO, interfaces=interface("eth0 up")),
    "a slow file system, up to the limits": directory(
        ONE, "logs", append_s=0.010, append_worst_s=0.2, fsync_s=0.5, read_s=1.0
    ),
    "reads up to the limit": directory(ONE, "data", read_s=0.05),
    "logs in an object store": directory(ONE, "logs", problem="is not a local path; not tried"),
    "a full disk of data": directory(ONE, "data", free_bytes=0, free_inodes=0),
    "1 GiB": directory(ONE, "logs", free_bytes=2**30, free_inodes=1_000),
    "room for two checkpoints": directory(ONE, "checkpoints", free_bytes=6 * GB),
    "a file system without inodes": directory(ONE, "logs", free_inodes=0, filesystem="btrfs"),
    "a clock of which a second is not certain": having(TWO, *SECOND, clock_offset_s=1.5, clock_error_s=0.5),
    "as many cores as asked for": host(loading(ALONE, loader_workers=7), cpus=tuple(range(8))),
    "a host with a single core": loading(bound((0,)), loader_workers=0),
    "a job of which nobody answered": replace(TWO, ranks=()),
    "ranks without facts": replace(TWO, ranks=tuple(replace(facts, preflight=None) for facts in TWO.ranks)),
    "the smallest facts": checking(4, lambda rank: PreflightFacts()),
    "without GPUs": on_cpu(ONE),
    "nameless hosts": named(network(host(loading(TWO, loader_workers=60), machine=""), interfaces=()), lambda rank: ""),
}
