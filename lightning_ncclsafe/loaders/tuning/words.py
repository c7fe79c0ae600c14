"""What the user is told of loader workers."""

from lightning_ncclsafe.loaders.tuning.budget import Bound, Budget
from lightning_ncclsafe.loaders.tuning.observing import BatchSize
from lightning_ncclsafe.loaders.tuning.trials import Change, Promise
from lightning_ncclsafe.report.times import share_words, time_words
from lightning_ncclsafe.rules.kit.wording import size_words

# Why a loader stays as it is, and what to do.
ADVICE_ONLY = "LoaderTuner(apply=False) only advises: set it"
SEEDED = (
    "the run is seeded, and random augmentation depends on num_workers: set it, or have it tried by "
    "LoaderTuner(apply_to_seeded=True)"
)
ITERABLE = "the batches of an iterable dataset may depend on num_workers: set it, if yours do not"
PERSISTS = "workers that persist may hold what they have read: set it"
OWN_WAY = "its class is iterated in a way of its own: set it"


def changed(name: str, change: Change) -> str:
    """What has become of a trial."""
    now, others = f"num_workers={change.workers}", f"num_workers={change.others}"
    if change.kind == "kept":
        share = share_words(change.wait_s / change.others_s)
        return (
            f"{name}: {now} instead of {change.others} from now on: a step takes {time_words(change.step_s)} instead of"
            f" {time_words(change.others_s)}, of which {share} was waiting for data"
        )
    if change.kind == "no gain":
        return (
            f"{name}: {now} stays: {others} was tried once, and a step took {time_words(change.others_s)} instead of"
            f" {time_words(change.step_s)}"
        )
    return (
        f"{name}: {now} again: with {others} a step has come to take {time_words(change.others_s)}, and took"
        f" {time_words(change.step_s)} before; it is not tried again"
    )


def advised(name: str, promise: Promise, why_fixed: str) -> str:
    """What is to be gained where nothing is changed."""
    known = promise.known
    return (
        f"{name}: {share_words(known.wait_s / known.step_s)} of each step of {time_words(known.step_s)} is waiting for "
        f"data; num_workers={promise.workers} instead of {known.workers} would make it {time_words(promise.step_s)}. "
        f"It is left as it is: {why_fixed}"
    )


def fewer_workers(name: str, asked: int, workers: int, budget: Budget) -> str:
    """Of a user's workers there are far more than cores."""
    return (
        f"{name}: num_workers={workers} instead of {asked}: on every rank, that is far more than there are cores for "
        f"({budget.cores_from})"
    )


def fewer_ahead(name: str, asked: int, most: int, size: BatchSize, bound: Bound, budget: Budget) -> str:
    """There is no room for as many batches as the user has set."""
    where = {
        "memory": f"memory ({budget.memory_from})",
        "shm": "/dev/shm (half of what is free)",
        "files": "open files (ulimit -n)",
    }[bound]
    batches = "1 batch" if most == 1 else f"{most} batches"
    return f"{name}: {batches} of {size_words(size.size_bytes)} ahead instead of {asked:,}: bound by {where}"
