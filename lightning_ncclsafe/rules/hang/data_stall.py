"""The cause data-stall: a rank waits for its dataloader."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import (
    CHILD_PROCESS,
    LOADER_PROCESS,
    POOL_TASK,
    TAKES_SHARED_LOCK,
    WAITS_FOR_OTHERS,
)
from lightning_ncclsafe.facts import ExceptionFacts, Frame, LoaderFacts, ProcessFacts, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Evidence,
    Finding,
    Timeline,
    at_words,
    below_user,
    blocked_at_one_line,
    deepest_user_frame,
    first_user_frame,
    hang_rule,
    how_we_know,
    is_in,
    last_user,
    location_of,
    memory_evidence,
    polling_remedy,
    short_of_memory,
    size_words,
    sleeps,
    straggler_confidence,
    straggler_finding,
    swaps,
    trainer_start,
)

_REMEDY = (
    "Look at the sample that is being read and at its storage; put the data on faster storage, or find workers, "
    "prefetch_factor and batch size that the host's cores and memory can serve for all ranks at once."
)
_REMEDY_MEMORY = (
    "The host is short of memory: use fewer workers or a smaller prefetch_factor; every rank has its own workers for "
    "each of its loaders."
)
_REMEDY_NO_WORKERS = (
    "This loader reads on the training thread. Look at what this line does: whether it ever comes to the next sample, "
    "and which sample and storage it reads."
)
_REMEDY_WORKERS = " If it is only slow, give the loader workers (num_workers)."
_REMEDY_UNSENT = (
    "Look for a traceback on this rank's stderr: a worker prints it if a batch, or the error raised in its place, "
    "cannot be pickled (local classes, lambdas, open files, locks). Return tensors and plain Python objects, and raise "
    "exceptions of classes at the top of a module. num_workers=0 raises the error in the rank itself."
)
_REMEDY_UNSENT_ERROR = (
    "Correct this error. The rank would have raised it, but its class cannot be pickled: it was made in a function or "
    "at run time (as botocore makes its own). Catch it in the dataset, and raise an exception of a class at the top of "
    "a module instead."
)
_REMEDY_LOCK = (
    "This line waits for a lock that nobody releases: look at what else takes it, and whether the worker itself has it "
    "already (only an RLock may be taken twice). If a thread held it when a worker "
    "was forked, it is never released there: create it in the worker (worker_init_fn), or start workers with "
    'multiprocessing_context="spawn".'
)
_REMEDY_FEEDER = (
    "This line waits for a thread or a process of the dataset: check whether that is still alive, and read its last "
    "output. Let it pass its exceptions to its reader, and wait with a timeout."
)
# C functions, which have no Python frame.
_LOCK = re.compile(r"\bacquire\(|\bf?lockf?\(|\bwith\b.*lock", re.IGNORECASE)


@hang_rule(after="slow-checkpoint", follows=("worker-died",))
def data_stall(view: Timeline) -> Iterator[Finding]:
    """A rank's main thread waits for the next batch, and the others wait for that rank.

    Symptom:
        Collectives time out on all ranks but one; whether it happens depends on the number of workers or on the
        storage.

    Cause:
        A slow sample, remote storage, stuck workers, too few or too many of them, or no memory left.

    Remedy:
        Look at what the workers do; adapt storage, workers and prefetching to cores and memory.

    Cannot see:
        What happens inside a worker's native code, beyond the kernel function it sleeps in.
    """
    shared = blocked_at_one_line(view)
    ranks = tuple(rank for rank in view.suspects if _is_stalled(view, rank) and rank not in shared)
    if not ranks:
        return
    facts = view.facts[ranks[0]]
    details = (item for rank in ranks[:LISTED] for item in _evidence(view.facts[rank]))
    yield straggler_finding(
        view,
        ranks,
        "waits|wait for the dataloader",
        _workers_words(facts),
        confidence=straggler_confidence(view),
        location=_worker_location(facts) or None,
        evidence=(*how_we_know(view, ranks), *details),
        remedy=_remedy(facts),
    )


def _is_stalled(view: Timeline, rank: int) -> bool:
    """Whether a rank waits for its training loader, and not for one in work that it does alone, under a condition."""
    doing = view.activities[rank]
    return doing.waits_for_data and not (doing.rank_condition and view.waiting)


def _own_stack(worker: ProcessFacts) -> tuple[Frame, ...]:
    """The frames of a worker's own work: a forked process also has those of the rank that forked it."""
    began = (depth for depth, frame in enumerate(worker.stack) if CHILD_PROCESS.has(frame.file, frame.function))
    return worker.stack[max(began, default=-1) + 1 :]


def _worker_location(facts: RankFacts) -> str:
    unsent = _unsent(facts)
    if unsent is not None:
        return location_of(deepest_user_frame(unsent.stack))
    return location_of(first_user_frame(map(_own_stack, facts.workers)))


def _unsent(facts: RankFacts) -> ExceptionFacts | None:
    """The error that a worker could not send, if that is what its rank waits for."""
    return next((worker.raised for worker in facts.workers if worker.raised), None) if _all_idle(facts) else None


def _unsent_words(facts: RankFacts) -> str:
    unsent = _unsent(facts)
    if unsent is None:
        return "what was made of the last one has not arrived"
    what = f"{unsent.type}: {unsent.message}".rstrip(": ")
    return f"{what}{at_words(deepest_user_frame(unsent.stack))}, which could not be pickled and sent to the rank"


def _workers_words(facts: RankFacts) -> str:
    if not facts.workers:
        idle = facts.loaders and not any(loader.num_workers for loader in facts.loaders)
        return ", which has no workers" if idle else ""
    if _all_idle(facts):
        who = "its only worker waits" if len(facts.workers) == 1 else f"all its {len(facts.workers)} workers wait"
        return f" ({who} for the next task: {_unsent_words(facts)})"
    doing = Counter(_worker_words(worker) for worker in facts.workers).most_common(2)
    every = len(facts.workers)
    if doing[0][1] == every:
        return f" (its {'only worker is' if every == 1 else f'{every} workers are'} {doing[0][0]})"
    listed = "; ".join(f"{count} {'is' if count == 1 else 'are'} {words}" for words, count in doing)
    return f" (of its {every} workers, {listed})"


def _all_idle(facts: RankFacts) -> bool:
    """Whether all workers wait for a task, so that none of them makes the batch that the rank waits for."""
    return bool(facts.workers) and all(
        any(
            LOADER_PROCESS.has(frame.file, frame.function) and POOL_TASK.has(called.file, called.function)
            for frame, called in itertools.pairwise(worker.stack)
        )
        for worker in facts.workers
    )


def _worker_words(worker: ProcessFacts) -> str:
    frame = deepest_user_frame(_own_stack(worker))
    kernel = f" in {worker.wait_channel}" if worker.wait_channel and not frame else ""
    state = f"in {worker.state}" if worker.state == "disk-sleep" else worker.state
    return f"{state or 'in an unknown state'}{at_words(frame)}{kernel}"


def _evidence(facts: RankFacts) -> Iterator[Evidence]:
    for loader in facts.loaders:
        yield Evidence(source="loader", rank=facts.rank, text=_loader_words(loader))
    for worker in facts.workers[:LISTED]:
        cpu = f", {worker.cpu_s:.1f} s of CPU time" if worker.cpu_s is not None else ""
        rss = f", {size_words(worker.rss_bytes)} resident" if worker.rss_bytes is not None else ""
        text = f"Worker {worker.pid} is {_worker_words(worker)}{cpu}{rss}."
        yield Evidence(source="process", rank=facts.rank, text=text)
    yield from memory_evidence(facts)


def _loader_words(loader: LoaderFacts) -> str:
    prefetch = f" with prefetch_factor={loader.prefetch_factor}" if loader.prefetch_factor is not None else ""
    batches = f", {loader.batches} batches" if loader.batches is not None else ""
    return f"{loader.dataset or 'A dataset'} is read with num_workers={loader.num_workers}{prefetch}{batches}."


def _remedy(facts: RankFacts) -> str:
    if (unsent := _unsent(facts)) is not None and deepest_user_frame(unsent.stack) is not None:
        return _REMEDY_UNSENT_ERROR
    if _all_idle(facts):
        return _REMEDY_UNSENT
    stacks = [_own_stack(worker) for worker in facts.workers] or [facts.stack]
    if remedy := next(filter(None, map(_remedy_for_wait, stacks)), ""):
        return remedy
    if short_of_memory(facts.host_facts) or swaps(facts.host_facts):
        return _REMEDY_MEMORY
    no_workers = facts.loaders and not any(loader.num_workers for loader in facts.loaders)
    if no_workers:
        return _REMEDY_NO_WORKERS + ("" if sleeps(facts.stack) else _REMEDY_WORKERS)
    return _REMEDY


def _remedy_for_wait(stack: tuple[Frame, ...]) -> str:
    """What to do if the user's innermost line waits for a lock, a thread or a process; else empty."""
    last = last_user(stack)
    if last < trainer_start(stack):
        return ""
    if polled := polling_remedy(stack):
        return polled
    below = below_user(stack)
    if is_in(TAKES_SHARED_LOCK, below[:1]):
        return _REMEDY_LOCK
    if is_in(WAITS_FOR_OTHERS, below):
        return _REMEDY_FEEDER
    return _REMEDY_LOCK if not below and _LOCK.search(stack[last].code) else ""
