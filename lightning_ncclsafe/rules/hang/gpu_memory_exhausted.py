"""The cause gpu-memory-exhausted: a rank's GPU has no memory left."""

import re
from collections import defaultdict
from collections.abc import Iterator

from lightning_ncclsafe.facts import CaughtException, ExceptionFacts, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Divergence,
    Evidence,
    Finding,
    Severity,
    Timeline,
    at_words,
    batch_words,
    branch_place,
    calls_words,
    clause,
    condition_words,
    error_words,
    exception_evidence,
    exception_place,
    finding,
    gpu_of,
    hang_rule,
    how_we_know,
    is_garbled,
    just_caught,
    location_of,
    message_of,
    raised_at,
    size_words,
    unless_caught,
    verb,
    where_words,
    while_others_wait,
)

_OUT = re.compile(
    r"(?:CUDA|HIP|XPU|MPS)(?: backend)? out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_ALLOC_FAILED|Failed to CUDA (?:m|c)alloc|Cuda failure \d* ?'?out of memory"
)
_OF_LIBRARY = re.compile(r"_STATUS_ALLOC_FAILED")
_RUN_OUT = {
    Confidence.CERTAIN: "run out of memory on",
    Confidence.LIKELY: "probably run out of memory on",
}
# "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free."
_AMOUNTS = re.compile(r"Tried to allocate (?P<wanted>[\d.]+ \w+).*?of which (?P<free>[\d.]+ \w+) is free", re.DOTALL)
_REMEDY_SWALLOWED = (
    "A rank that continues after this exception leaves out collectives that the others call. Let all ranks agree on it "
    "first (reduce a flag on all ranks, in every batch), or let the exception end the run; and use less memory: a "
    "smaller batch, a limit on the longest sample."
)
# If every rank of a large job raises at a different line, one of the first explains the others.
_MOST = 16
_FULL_SHARE = 0.02
_ROOM_SHARE = 0.1


@hang_rule(
    remedy=(
        "Use less memory on this GPU: a smaller batch with more gradient accumulation, a limit on the longest sample, "
        "activation checkpointing, sharding; PYTORCH_ALLOC_CONF=expandable_segments:True if much is reserved but not "
        "allocated. If only some batches need so much, sort or cut samples by length: every rank must cope with its "
        "largest one. Other processes on this GPU count, too (nvidia-smi)."
    ),
    reads_exceptions=True,
)
def gpu_memory_exhausted(view: Timeline) -> Iterator[Finding]:
    """A rank ran out of GPU memory, and the others wait for a rank that will not come.

    Symptom:
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …" on one rank, perhaps swallowed by an except
        block; the others wait in the next collective until the timeout.

    Cause:
        A larger batch or a longer sample on this rank, work that only this rank does, another process on its GPU, or
        fragmented memory.

    Remedy:
        Use less memory on this rank; limit the largest sample.

    Cannot see:
        Which tensors take the memory. "Tried to allocate more than 1EB" is not a lack of memory: it follows from ranks
        that called different collectives of objects, and is not reported as this.
    """
    alike: dict[tuple[str, Confidence], list[int]] = defaultdict(list)
    out = {rank: facts for rank, facts in sorted(view.facts.items()) if _is_out_of_memory(facts)}
    whole = {location_of(exception_place(facts)): facts for facts in out.values() if exception_place(facts)}
    for rank, facts in out.items():
        place = location_of(exception_place(facts))
        if not place:
            place = next((where for where, other in whole.items() if _is_end_of(facts, other)), "")
        alike[place, _confidence(facts)].append(rank)
    for (_, confidence), ranks in [*alike.items()][:_MOST]:
        yield _raised(view, tuple(ranks), confidence)
    if (split := view.any_divergence) is not None:
        yield from _swallowed(view, split)
    for rank in view.working(view.stragglers):
        if _is_full(view, rank):
            yield _full(view, rank)


def _is_out_of_memory(facts: RankFacts) -> bool:
    exception = facts.exception
    return exception is not None and not is_garbled(exception) and _is_lack(exception)


def _is_lack(error: ExceptionFacts | CaughtException) -> bool:
    return error.type == "OutOfMemoryError" or bool(_OUT.search(error.message))


def _is_end_of(cut: RankFacts, other: RankFacts) -> bool:
    """Whether the stack of an exception, whose beginning a log may lack, is the end of another one's."""
    ours, theirs = cut.raised_stack, other.raised_stack
    return bool(ours) and theirs[-len(ours) :] == ours


def _confidence(facts: RankFacts) -> Confidence:
    """How sure it is: allocations of cuBLAS and cuDNN also fail after an error in an earlier kernel."""
    message = message_of(facts)
    is_of_library = bool(_OF_LIBRARY.search(message)) and "out of memory" not in message
    return Confidence.LIKELY if is_of_library else Confidence.CERTAIN


def _raised(view: Timeline, ranks: tuple[int, ...], confidence: Confidence) -> Finding:
    facts = view.facts[ranks[0]]
    frame = next(filter(None, (exception_place(view.facts[rank]) for rank in ranks)), None)
    at = at_words(frame)
    amounts = _AMOUNTS.search(message_of(facts))
    needs = f" (it needed {amounts['wanted']}, with {amounts['free']} free)" if amounts else ""
    whose = f" (rank {ranks[0]} needed {amounts['wanted']}, with {amounts['free']} free)" if amounts else ""
    their = verb(ranks, "its GPU", "their GPUs")
    who = f"{clause(ranks, 'has|have')} {_RUN_OUT[confidence]} {their}"
    text = f"{who}{verb(ranks, needs, whose)}{at}, {batch_words(facts.progress)}{while_others_wait(view, ranks)}."
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR,
        confidence=unless_caught(view, confidence),
        location=location_of(frame),
        evidence=(
            *(item for rank in ranks[:LISTED] for item in exception_evidence(view.facts[rank])),
            *_evidence(view),
        ),
    )


def _swallowed(view: Timeline, split: Divergence) -> Iterator[Finding]:
    """Ranks that have caught the exception and continued, and have made other calls than the rest since then."""
    for rank in (rank for rank in split.calls if rank in view.facts):
        for error in [*filter(_is_lack, just_caught(view, rank))][:1]:
            yield _continued(view, rank, error, split)


def _continued(view: Timeline, rank: int, error: CaughtException, split: Divergence) -> Finding:
    frame = next((frame for frame in reversed(error.stack) if frame.user and frame.handler), None)
    handlers = (branch for branch in frame.branches if branch.on == "exception") if frame is not None else ()
    handler = next(iter(handlers), None)
    by = f", in {condition_words(frame.handler)}" if frame is not None else ""
    place = branch_place(frame, handler) if frame is not None and handler is not None else location_of(raised_at(error))
    at = at_words(raised_at(error))
    text = (
        f"Rank {rank} has run out of memory on its GPU: it caught {error_words(error)}{at}{by}, "
        f"and continued. Since then, its calls differ from the others': {calls_words(view, split)}."
    )
    return finding(
        view,
        (rank,),
        text,
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        location=place,
        evidence=(*_evidence(view), *how_we_know(view, (rank,))),
        remedy=_REMEDY_SWALLOWED,
    )


def _free_share(facts: RankFacts) -> float | None:
    gpu = gpu_of(facts)
    if gpu is None or gpu.free_bytes is None or not gpu.total_bytes:
        return None
    return gpu.free_bytes / gpu.total_bytes


def _is_full(view: Timeline, rank: int) -> bool:
    """Whether its GPU has next to no memory left, and the GPUs of the others have."""
    own = _free_share(view.facts[rank])
    if own is None or own >= _FULL_SHARE:
        return False
    others = [share for other in view.waiting_besides((rank,)) if (share := _free_share(view.facts[other])) is not None]
    return bool(others) and min(others) > _ROOM_SHARE


def _full(view: Timeline, rank: int) -> Finding:
    text = (
        f"The memory of rank {rank}'s GPU is full, and those of the others are not: the rank may be busy freeing and "
        f"reallocating memory, {where_words(view, rank)}{while_others_wait(view, (rank,))}."
    )
    # torch's cache may also hold all memory, which delays nothing.
    return finding(
        view, (rank,), text, confidence=Confidence.POSSIBLE, evidence=(*_evidence(view), *how_we_know(view, (rank,)))
    )


def _evidence(view: Timeline) -> Iterator[Evidence]:
    """The memory of all GPUs, which shows one that differs."""
    for rank, facts in sorted(view.facts.items())[:LISTED]:
        gpu = gpu_of(facts)
        if gpu is not None and gpu.free_bytes is not None and gpu.total_bytes is not None:
            text = f"Its GPU has {size_words(gpu.free_bytes)} of {size_words(gpu.total_bytes)} free."
            others = f" Others use it, too: {', '.join(gpu.foreign_processes[:3])}." if gpu.foreign_processes else ""
            yield Evidence(source="gpu", rank=rank, text=text + others)
