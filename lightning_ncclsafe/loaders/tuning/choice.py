"""How many workers, and how many batches ahead, follow from what was measured and what there is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.expected import (
    USUAL_PREFETCH,
    covering,
    expected_wait_s,
    most_prefetch,
    workers_by_cores,
    workers_needed,
)
from lightning_ncclsafe.loaders.tuning.measures import Measures

Bound = Literal["need", "cores", "memory", "shm", "files"]

# Workers are to be a tenth faster than the step: with less, the queue of ready batches never fills up again.
HEADROOM = 1.1
# Loading in the main thread that costs less than this share of a step is not worth a process.
_FREE_SHARE = 0.01
# What the main thread does for a batch that a worker hands over: torch 2.13, measured with batches of one tensor.
HANDOVER_S = 0.0009


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting of one loader.

    Attributes:
        workers: ``num_workers``.
        prefetch: ``prefetch_factor``; 0 without workers.
        bound: What keeps it from being larger: nothing more is needed, or what there is no more of.
        wait_s: How long each batch is expected to be waited for with it, seconds.
    """

    workers: int
    prefetch: int
    bound: Bound = "need"
    wait_s: float = 0.0


def choose(measures: Measures, budget: Budget, *, copies: int = 1) -> Choice:
    """The cheapest setting with which the loader is expected to stay ahead of the step, or the largest there is.

    Args:
        measures: What was measured, with whatever setting; the worst of all ranks.
        budget: What this loader may use: the least of all ranks, less what other loaders use.
        copies: How often a batch that is ready is held in memory: 2 where it is pinned.
    """
    if 0 < measures.service_s < max(_FREE_SHARE * measures.gap_s, HANDOVER_S):
        return setting(0, 0, measures, budget)
    need = workers_needed(measures, HEADROOM)
    most = min(need, workers_by_cores(measures, budget))

    def wanted(workers: int) -> int:
        return covering(workers, measures)

    workers, prefetch = fitting(most, wanted, measures, budget, copies=copies)
    bound: Bound = "cores" if need > most else "need"
    if most and (workers, prefetch) != (most, wanted(most)):
        bound = scarcest(measures, budget, copies=copies)
    return setting(workers, prefetch, measures, budget, bound)


def setting(workers: int, prefetch: int, measures: Measures, budget: Budget, bound: Bound = "need") -> Choice:
    """A setting with what is expected of it."""
    wait_s = expected_wait_s(workers, prefetch, measures, budget)
    return Choice(workers=workers, prefetch=prefetch if workers else 0, bound=bound, wait_s=wait_s)


def fitting(
    most: int, prefetch_of: Callable[[int], int], measures: Measures, budget: Budget, *, copies: int = 1
) -> tuple[int, int]:
    """Workers and prefetch that fit, with the least expected wait.

    Fewer batches ahead come first, then fewer workers, as these cost speed in any case; a prefetch of 1 only where it
    leaves room for workers that make more of it.

    Args:
        most: Most workers.
        prefetch_of: Most prefetch with a number of workers.
        measures: What was measured.
        budget: What there is.
        copies: How often a batch that is ready is held in memory.
    """
    found: list[tuple[int, int]] = []
    for least in (USUAL_PREFETCH, 1):
        for workers in range(most, 0, -1):
            prefetch = min(prefetch_of(workers), most_prefetch(workers, measures, budget, copies=copies))
            if prefetch >= least:
                found.append((workers, prefetch))
                break
    return min(found, key=lambda pair: expected_wait_s(pair[0], pair[1], measures, budget), default=(0, 0))


def scarcest(measures: Measures, budget: Budget, *, copies: int = 1) -> Bound:
    """Which of memory, shared memory and open files is enough for fewer batches of one worker."""
    batches: dict[Bound, float] = {}
    batch_bytes = max(measures.batch_bytes, 1)
    if budget.memory_bytes is not None:
        batches["memory"] = (budget.memory_bytes - measures.worker_bytes) / (max(1, copies) * batch_bytes)
    if budget.shm_bytes is not None:
        batches["shm"] = budget.shm_bytes / batch_bytes
    if budget.open_files is not None and measures.tensors:
        batches["files"] = budget.open_files / measures.tensors
    return min(batches, key=batches.__getitem__, default="memory")
