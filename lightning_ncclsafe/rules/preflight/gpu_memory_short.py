"""The cause gpu-memory-short: a GPU has too little free memory for the model, or less than those of its peers."""

from collections.abc import Iterable, Iterator
from statistics import median_high

from lightning_ncclsafe.facts import GpuFacts
from lightning_ncclsafe.rules.kit import Checked, Severity, size_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# Of the GPU's memory, below the median of its peers: more than a CUDA context or two take (some 0.5 GB each).
_OUTLIER = 0.1


@check(
    after="unusable-directory",
    remedy=(
        "Find what takes this GPU's memory (nvidia-smi) and end it. Where all GPUs lack memory, shard the model "
        "(FSDP), use a lower precision, or larger GPUs."
    ),
)
def gpu_memory_short(view: Checked) -> Iterable[Problem]:
    """What the model needs is not free on a GPU, or one GPU has much less free memory than its peers.

    Symptom:
        CUDA out of memory on one rank while DDP is built or in the first steps; the others wait for it.

    Cause:
        Another process on the GPU, ranks that create tensors on device 0, a GPU of another size, a model too large.

    Remedy:
        Free this GPU, or make the model smaller per GPU.

    Cannot see:
        Memory for activations, which depends on the batch.
    """
    return (*_too_short(view), *_outliers(view))


def _too_short(view: Checked) -> Iterator[Problem]:
    for rank, facts in view.facts.items():
        free, need = facts.gpu.free_bytes if facts.gpu is not None else None, facts.load.replica_bytes
        if free is not None and need is not None and need > free:
            text = f"{size_words(free)} free on the GPU, {size_words(need)} needed for the model and its training state"
            yield Problem(ranks=(rank,), text=text, badness=float(need - free), severity=Severity.ERROR)


def _outliers(view: Checked) -> Iterator[Problem]:
    for _, ranks in view.known(lambda facts: (facts.gpu.name, facts.gpu.total_bytes) if facts.gpu else None).parts:
        gpus = [(rank, gpu) for rank in ranks if (gpu := view.facts[rank].gpu) is not None]
        yield from _of_one_kind([(rank, gpu, gpu.free_bytes) for rank, gpu in gpus if gpu.free_bytes is not None])


def _of_one_kind(gpus: list[tuple[int, GpuFacts, int]]) -> Iterator[Problem]:
    usual = median_high([free for _, _, free in gpus]) if gpus else 0
    for rank, gpu, free in gpus:
        if usual - free > _OUTLIER * (gpu.total_bytes or usual):
            text = f"{size_words(free)} free on the GPU, peers have {size_words(usual)}"
            yield Problem(ranks=(rank,), text=text, badness=float(usual - free))
