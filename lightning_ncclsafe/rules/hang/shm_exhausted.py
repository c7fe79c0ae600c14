"""The cause shm-exhausted: /dev/shm is full, so that a rank's workers cannot hand over their batches."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Severity,
    Timeline,
    batch_words,
    exception_evidence,
    finding,
    hang_rule,
    how_we_know,
    is_bus_error,
    ranks_by,
    ranks_words,
    says_shm_is_full,
    shm_is_full,
    size_words,
    unless_caught,
    where_words,
    while_others_wait,
)


@hang_rule(
    after="gpu-memory-exhausted",
    remedy=(
        "Make /dev/shm larger (docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir with medium: Memory "
        "on /dev/shm), or put less into it: fewer workers, a smaller prefetch_factor or batch. Remove what earlier "
        "runs have left there (ls -l /dev/shm)."
    ),
    reads_exceptions=True,
)
def shm_exhausted(view: Timeline) -> Iterator[Finding]:
    """Shared memory (/dev/shm) is used up.

    Symptom:
        "DataLoader worker (pid …) is killed by signal: Bus error", "unable to write to file </torch_…>: No space left
        on device", or NCCL's "Error while creating shared memory segment"; the other ranks wait.

    Cause:
        /dev/shm is smaller than the batches that workers prefetch (64 MB in Docker by default), or full of what earlier
        runs left.

    Remedy:
        Enlarge /dev/shm, or put less into it.

    Cannot see:
        Who filled it.
    """
    alike = ranks_by({rank: _confidence(facts) for rank, facts in sorted(view.facts.items())})
    for confidence, ranks in alike.items():
        if confidence is not None:
            yield _raised(view, ranks, confidence)
    for rank in view.working(view.stragglers):
        if shm_is_full(view.facts[rank]) and view.activities[rank].waits_for_data:
            yield _waits(view, rank)


def _confidence(facts: RankFacts) -> Confidence | None:
    """How sure a rank's exception makes it; None if it is about something else."""
    if says_shm_is_full(facts):
        # torch only suggests this for a bus error: a memory-mapped file that was truncated is another reason.
        return Confidence.LIKELY if is_bus_error(facts) and not shm_is_full(facts) else Confidence.CERTAIN
    return Confidence.POSSIBLE if is_bus_error(facts) else None


_USED_UP = {
    Confidence.CERTAIN: "is used up",
    Confidence.LIKELY: "is probably used up",
    Confidence.POSSIBLE: "was perhaps used up for a moment",
}


def _raised(view: Timeline, ranks: tuple[int, ...], confidence: Confidence) -> Finding:
    facts = view.facts[ranks[0]]
    text = (
        f"Shared memory (/dev/shm) {_USED_UP[confidence]} on {ranks_words(ranks)}{_room(facts)}, "
        f"{batch_words(facts.progress)}{while_others_wait(view, ranks)}."
    )
    listed = (view.facts[rank] for rank in ranks[:LISTED])
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR,
        confidence=unless_caught(view, confidence),
        evidence=tuple(item for facts in listed for item in (*exception_evidence(facts), *_evidence(facts))),
        location="",
    )


def _waits(view: Timeline, rank: int) -> Finding:
    facts = view.facts[rank]
    text = (
        f"Rank {rank} waits for batches, and /dev/shm, through which its workers pass them, is full{_room(facts)}: "
        f"{where_words(view, rank)}{while_others_wait(view, (rank,))}."
    )
    # A worker that finds no room raises an exception; a dataset may be kept there on purpose.
    return finding(
        view, (rank,), text, confidence=Confidence.POSSIBLE, evidence=(*_evidence(facts), *how_we_know(view, (rank,)))
    )


def _room(facts: RankFacts) -> str:
    total, free = facts.machine.shm_total_bytes, facts.machine.shm_free_bytes
    # The worker that filled it may be gone by now.
    return "" if total is None or free is None else f" ({size_words(free)} of its {size_words(total)} are free now)"


def _evidence(facts: RankFacts) -> Iterator[Evidence]:
    total, free = facts.machine.shm_total_bytes, facts.machine.shm_free_bytes
    if total is not None and free is not None:
        text = f"/dev/shm has {size_words(total)}, of which {size_words(free)} are free now."
        yield Evidence(source="host", rank=facts.rank, text=text)
    for loader in facts.loaders:
        prefetch = f" and prefetch_factor={loader.prefetch_factor}" if loader.prefetch_factor is not None else ""
        text = f"{loader.dataset or 'A dataset'} is read with num_workers={loader.num_workers}{prefetch}."
        yield Evidence(source="loader", rank=facts.rank, text=text)
