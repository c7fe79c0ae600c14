"""What is to be expected of a number of workers and of batches ahead, and how many of them there may be."""

from math import ceil, floor

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.measures import Measures

# A worker and the main thread are never quite busy all the time, while both are measured as if they were: without a
# tenth of tolerance, 7.02 cores' worth of 7 workers and a waiting main thread would cost one worker of 8 cores.
CORE_TOLERANCE = 1.1
# Batches ahead of each worker, whatever was measured: beyond, one slow batch costs less than filling the queue anew.
MOST_PREFETCH = 64
USUAL_PREFETCH = 2  # torch's default; with 1, a worker that is done has nothing to do until its batch is taken
_JITTER = 1.1  # batches that take so many times the mean at most all take the same time
_SLOW_ONES = 3
_HAIR = 1e-9


def expected_wait_s(workers: int, prefetch: int, measures: Measures, budget: Budget) -> float:
    """How long each batch would be waited for, seconds.

    With one batch ahead of each, workers that are done wait for the slowest of them, as batches are taken in order; one
    worker alone waits for nobody.
    """
    if workers == 0:
        return measures.service_s
    service_s = measures.service_s if prefetch > 1 or workers == 1 else max(measures.service_s, measures.service_q97_s)
    wanted_cores = workers * measures.cpu_share + own_cores(measures)
    contention = max(1.0, wanted_cores / (budget.cores * CORE_TOLERANCE)) if budget.cores > 0 else 1.0
    return max(0.0, service_s * contention / workers - measures.gap_s)


def own_cores(measures: Measures) -> float:
    """Cores that the process would keep busy if it did not load batches itself."""
    if measures.workers or measures.gap_s + measures.service_s <= 0:
        return measures.own_cores
    loading = measures.cpu_share * measures.service_s / (measures.gap_s + measures.service_s)
    return max(0.0, measures.own_cores - loading)


def workers_needed(measures: Measures, headroom: float) -> int:
    """Workers that are faster than the step by a factor; as many as anybody can have where the step takes no time."""
    if measures.service_s <= 0:
        return max(1, measures.workers)  # nothing was measured
    if measures.gap_s <= 0:
        return 1 << 30
    return max(1, ceil(headroom * measures.service_s / measures.gap_s - _HAIR))


def workers_by_cores(measures: Measures, budget: Budget) -> int:
    """Most workers, given what the process itself keeps busy: one that loads instead of it costs nothing more."""
    free = budget.cores * CORE_TOLERANCE - own_cores(measures)
    at_once = floor(max(0.0, free) / measures.cpu_share + _HAIR) if measures.cpu_share > 0 else budget.workers
    return max(0, min(budget.workers, max(1, at_once)))


def most_prefetch(workers: int, measures: Measures, budget: Budget, *, copies: int = 1) -> int:
    """Most batches ahead of each worker for which there are memory, shared memory and files; 0 for none.

    Args:
        workers: How many workers, at least one.
        measures: Sizes of workers and batches.
        budget: What there is.
        copies: How often a batch that is ready is held in memory.
    """
    most = MOST_PREFETCH
    ahead_bytes = workers * measures.batch_bytes
    if budget.memory_bytes is not None:
        left_bytes = budget.memory_bytes - workers * measures.worker_bytes
        most = min(most, left_bytes // max(1, ahead_bytes * copies))
    if budget.shm_bytes is not None and ahead_bytes:
        most = min(most, budget.shm_bytes // ahead_bytes)
    if budget.open_files is not None and measures.tensors:
        most = min(most, budget.open_files // (workers * measures.tensors))
    return max(0, most)


def covering(workers: int, measures: Measures) -> int:
    """Batches ahead of each worker with which those that are ready last for as long as a slow one takes (q97).

    What a slow one takes beyond the others counts threefold: the next slow one comes before the queue is full again,
    and workers that are done have to wait for it, as batches are taken in order. In simulations of batches as varied as
    exponential ones, that is where a longer queue gains less than 5 %.
    """
    paced_s = workers * max(measures.gap_s, measures.service_s / workers)
    slow = measures.service_q97_s / paced_s if paced_s > 0 else 1.0
    return min(MOST_PREFETCH, USUAL_PREFETCH + ceil(_SLOW_ONES * max(0.0, slow - _JITTER)))
