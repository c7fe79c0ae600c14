"""GPUs that lack memory, have errors, or are shared."""

from collections.abc import Iterator
from statistics import median_high

from lightning_ncclsafe.facts import GpuFacts
from lightning_ncclsafe.rules.kit import JobHosts, Plan, Severity, counted, size_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# Share of the GPU's memory below the median of its peers: more than two CUDA contexts take (some 0.5 GB each).
_OUTLIER = 0.1


@check(
    after="unusable-directory",
    remedy=(
        "Find what takes this GPU's memory (nvidia-smi) and end it. If all GPUs lack memory, shard the model (FSDP), "
        "use a lower precision, or larger GPUs."
    ),
)
def gpu_memory_short(view: JobHosts) -> Iterator[Problem]:
    """The model does not fit into the free memory of a GPU, or one GPU has much less free memory than its peers.

    Symptom:
        "CUDA out of memory" on one rank while DDP is built or in the first steps; the others wait for it.

    Cause:
        Another process on the GPU, ranks that create tensors on device 0, a GPU of another size, a model too large.

    Remedy:
        Free this GPU, or make the model smaller per GPU.

    Cannot see:
        Memory for activations, which depends on the batch.
    """
    yield from _too_short(view)
    yield from _outliers(view)


def _too_short(view: JobHosts) -> Iterator[Problem]:
    for rank, facts in view.facts.items():
        free, need = facts.gpu.free_bytes if facts.gpu is not None else None, facts.load.replica_bytes
        if free is not None and need is not None and need > free:
            text = f"{size_words(free)} free on the GPU, {size_words(need)} needed for the model and its training state"
            yield Problem(ranks=(rank,), text=text, badness=float(need - free), severity=Severity.ERROR)


def _outliers(view: JobHosts) -> Iterator[Problem]:
    for _, ranks in view.known(lambda facts: (facts.gpu.name, facts.gpu.total_bytes) if facts.gpu else None).parts:
        gpus = [(rank, gpu) for rank in ranks if (gpu := view.facts[rank].gpu) is not None]
        yield from _of_one_kind([(rank, gpu, gpu.free_bytes) for rank, gpu in gpus if gpu.free_bytes is not None])


def _of_one_kind(gpus: list[tuple[int, GpuFacts, int]]) -> Iterator[Problem]:
    usual = median_high([free for _, _, free in gpus]) if gpus else 0
    for rank, gpu, free in gpus:
        if usual - free > _OUTLIER * (gpu.total_bytes or usual):
            text = f"{size_words(free)} free on the GPU, peers have {size_words(usual)}"
            yield Problem(ranks=(rank,), text=text, badness=float(usual - free))


_LISTED = 3


@check(
    after="swap-in-use",
    remedy=(
        "Take this host out of the job and have the GPU reset (nvidia-smi --gpu-reset) or the host rebooted; if it is "
        "throttled, look at cooling and power (nvidia-smi -q -d PERFORMANCE)."
    ),
    plan=Plan.RESTART_WITHOUT_HOST,
)
def gpu_unhealthy(view: JobHosts) -> Iterator[Problem]:
    """The driver reports memory errors, a pending repair, throttled clocks, Xid errors or a recovery action.

    Symptom:
        One rank is slower than all others in every step, or its collectives start and never end.

    Cause:
        Failing memory or links, heat, a power limit, a driver that has lost the GPU before.

    Remedy:
        Leave this host out until its GPU is reset or replaced.

    Cannot see:
        Errors that the driver does not count; Xid errors if the kernel's log cannot be read.
    """
    for rank, facts in view.facts.items():
        words = list(_words(facts.gpu)) if facts.gpu is not None else []
        if words and facts.gpu is not None:
            yield Problem(
                ranks=(rank,), text=f"GPU {facts.gpu.index}: {', '.join(words)}", badness=float(_badness(facts.gpu))
            )


def _words(gpu: GpuFacts) -> Iterator[str]:
    if gpu.recovery_action:
        yield f"the driver asks for: {gpu.recovery_action}"
    if gpu.xids:
        yield f"Xid {', '.join(gpu.xids[-_LISTED:])}"
    if gpu.ecc_errors and gpu.ecc_errors > 0:
        yield f"{counted(gpu.ecc_errors, 'uncorrected memory error')}"
    if gpu.pending_repair:
        yield "a repair of its memory is pending or has failed"
    if gpu.throttled_by:
        yield f"clocks held down by {', '.join(gpu.throttled_by)}"


def _badness(gpu: GpuFacts) -> int:
    """Errors that end runs come before those that slow them."""
    return 2 * bool(gpu.recovery_action or gpu.xids) + bool((gpu.ecc_errors or 0) > 0 or gpu.pending_repair)


@check(
    after="gpu-unhealthy",
    remedy=(
        "Give every rank its own GPU (devices and num_nodes of the Trainer, CUDA_VISIBLE_DEVICES, --gpus-per-node), "
        "and end the other processes, which may be left over from an earlier run, or take other GPUs."
    ),
)
def gpu_shared(view: JobHosts) -> Iterator[Problem]:
    """Two ranks use one GPU, or processes that are not ranks of this job use it.

    Symptom:
        "Duplicate GPU detected" (NCCL), "CUDA out of memory" on one rank, or a rank that is always the last one.

    Cause:
        Ranks that all take device 0, more ranks than GPUs, a process of an earlier run that never ended, another user.

    Remedy:
        Use one GPU per rank, and nothing else on it.

    Cannot see:
        Processes of other containers, where the driver hides them.
    """
    yield from _among_ranks(view)
    yield from _with_others(view)


def _among_ranks(view: JobHosts) -> Iterator[Problem]:
    for uuid, ranks in view.known(lambda facts: facts.gpu.uuid if facts.gpu is not None else None).parts:
        if len(ranks) > 1:
            yield Problem(ranks=ranks, text=f"one GPU for {len(ranks):,} ranks ({uuid})", badness=float(len(ranks)))


def _with_others(view: JobHosts) -> Iterator[Problem]:
    for rank, facts in view.facts.items():
        seen = facts.gpu.foreign_processes if facts.gpu is not None else ()
        # Before ranks have met, none knows the processes of the others.
        ranks = tuple(f"pid {one.pid} (" for one in view.job.ranks if one.host == view.names[rank])
        if others := [process for process in seen if not process.startswith(ranks)]:
            more = f", and {len(others) - _LISTED:,} more" if len(others) > _LISTED else ""
            yield Problem(ranks=(rank,), text=f"other processes on the GPU: {'; '.join(others[:_LISTED])}{more}")
