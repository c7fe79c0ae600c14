"""The cause gpu-shared: a GPU is used by several ranks of this job, or by other processes."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.rules.kit import Checked
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_LISTED = 3


@check(
    after="gpu-unhealthy",
    remedy=(
        "Give every rank a GPU of its own (devices and num_nodes of the Trainer, CUDA_VISIBLE_DEVICES, "
        "--gpus-per-node), and end the other processes, which may be left over from an earlier run, or take other GPUs."
    ),
)
def gpu_shared(view: Checked) -> Iterable[Problem]:
    """Two ranks use one GPU, or processes that are no ranks of this job are on it.

    Symptom:
        NCCL's "Duplicate GPU detected", CUDA out of memory on one rank, a rank that is always the last one.

    Cause:
        Ranks that all take device 0, more ranks than GPUs, a process of an earlier run that never ended, another user.

    Remedy:
        One GPU per rank, and nobody else on it.

    Cannot see:
        Processes of other containers, where the driver hides them.
    """
    return (*_among_ranks(view), *_with_others(view))


def _among_ranks(view: Checked) -> Iterator[Problem]:
    for uuid, ranks in view.known(lambda facts: facts.gpu.uuid if facts.gpu is not None else None).parts:
        if len(ranks) > 1:
            yield Problem(ranks=ranks, text=f"one GPU for {len(ranks):,} ranks ({uuid})", badness=float(len(ranks)))


def _with_others(view: Checked) -> Iterator[Problem]:
    for rank, facts in view.facts.items():
        others = facts.gpu.foreign_processes if facts.gpu is not None else ()
        if others:
            more = f", and {len(others) - _LISTED:,} more" if len(others) > _LISTED else ""
            yield Problem(ranks=(rank,), text=f"other processes on the GPU: {'; '.join(others[:_LISTED])}{more}")
